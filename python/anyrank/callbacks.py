# SPDX-License-Identifier: Apache-2.0
"""anyrank.Callback: anyrank.watch for the Trainers of transformers and of Lightning. watch.md has the rules.

Both libraries accept instances of their own class alone, and neither is imported here: a callback becomes an instance
of the classes of those that the program has imported before it.
"""

from __future__ import annotations

import functools
import os
import sys
import typing

from anyrank._errors import AnyrankError
from anyrank.watch import watch
from anyrank.watch_rules import Finding

if typing.TYPE_CHECKING:
    from anyrank.capture._watch import Watch

LIBRARIES = {"transformers": "TrainerCallback", "lightning.pytorch": "Callback", "pytorch_lightning": "Callback"}


class Callback:
    """Watches the runs of a Trainer: Trainer(callbacks=[anyrank.Callback(every=100)]), of transformers or Lightning.

    every, folder, on_finding  as of anyrank.watch
    log        the number of findings, `anyrank/findings`, is logged with the loss: Trainer's log, which takes text, has
               the first of them too, once, as `anyrank/first`
    further arguments  as of anyrank.watch

    findings: those of the last run, on the first rank. Steps have the numbers of the Trainer's global_step.
    """

    def __new__(cls, *_args: typing.Any, **_further: typing.Any) -> Callback:
        return _new(cls)

    def __init__(self, every: int = 100, folder: str | os.PathLike[str] = "anyrank-watch",
                 on_finding: typing.Callable[[Finding], object] | None = None, log: bool = True,
                 **further: typing.Any) -> None:
        self._options = {"every": every, "folder": folder, "on_finding": on_finding, **further}
        self._logs, self._told, self._steps = log, False, 0
        self._watch: Watch | None = None

    def __reduce__(self) -> tuple[typing.Any, ...]:
        """Pickles as the named class; the class with the libraries' bases is created again when the pickle is read."""
        return _new, (getattr(type(self), "_named", type(self)),), {**vars(self), "_watch": None}

    @property
    def findings(self) -> list[Finding]:
        return self._watch.findings if self._watch is not None else []

    def _begin(self, model: typing.Any, optimizer: typing.Any, steps: int) -> None:
        """Begins a run, after this many steps of an earlier run."""
        self._end(RuntimeError("another run began"))  # transformers calls no callback after an exception
        self._steps, self._told = steps, False
        self._watch = watch(model, optimizer, **{"first_step": steps + 1, **self._options})
        self._watch.start()

    def _end(self, error: BaseException | None = None) -> None:
        if self._watch is not None:
            self._watch.__exit__(type(error) if error is not None else None, error, None)

    # --- transformers: args, state, control, and the rest by name -----------------------------------------------------

    def on_train_begin(self, _args: typing.Any, state: typing.Any, _control: typing.Any, **objects: typing.Any) -> None:
        self._begin(objects["model"], objects.get("optimizer"), state.global_step)

    def on_step_end(self, *_given: typing.Any, **_further: typing.Any) -> None:
        if self._watch is not None:
            self._watch.step()  # now, and not at the next pass: before the log, evaluation, checkpoint of this step

    def on_log(self, _args: typing.Any, state: typing.Any, _control: typing.Any, logs: typing.Any = None,
               **_further: typing.Any) -> None:
        """Changes the history's copy of `logs`, which later callbacks read. Logs of evaluations are left alone, because
        a hyperparameter search may use their sum."""
        if self._logs and self._watch is not None and state.is_world_process_zero and {"loss", "train_loss"} & {*logs}:
            metrics = self._watch.metrics()
            if not self.findings or self._told:
                del metrics["anyrank/first"]
            self._told = bool(self.findings)
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    # --- Lightning: trainer, module, .. -------------------------------------------------------------------------------

    def on_train_start(self, trainer: typing.Any, module: typing.Any) -> None:
        self._begin(module, trainer.optimizers, trainer.global_step)

    def on_train_batch_end(self, trainer: typing.Any, module: typing.Any, *_given: typing.Any) -> None:
        if self._watch is not None and trainer.global_step > self._steps:  # else it was a micro-batch
            self._steps = trainer.global_step
            self._watch.step()
        if self._logs:
            module.log("anyrank/findings", float(len(self.findings)), rank_zero_only=True)

    def on_exception(self, _trainer: typing.Any, _module: typing.Any, exception: BaseException) -> None:
        self._end(exception)

    # --- both ---------------------------------------------------------------------------------------------------------

    def on_train_end(self, *objects: typing.Any, **further: typing.Any) -> None:
        self._end()
        if self._logs and not further and objects[0].is_global_zero:  # Lightning, which logs each 50th step alone
            for logger in objects[0].loggers:
                logger.log_metrics({"anyrank/findings": len(self.findings)}, step=objects[0].global_step)


def _new(cls: typing.Any) -> Callback:
    """Creates an uninitialised callback with the bases of the installed libraries."""
    bases = tuple(getattr(sys.modules[name], base) for name, base in LIBRARIES.items() if name in sys.modules)
    if not bases:
        raise AnyrankError(f"anyrank.Callback: none of {', '.join(LIBRARIES)} is imported: import the library whose "
                           "Trainer it is for before")
    new: Callback = object.__new__(_with_bases(cls, tuple(base for base in bases if not issubclass(cls, base))))
    return new


@functools.lru_cache(maxsize=None)
def _with_bases(cls: type[Callback], bases: tuple[type, ...]) -> type[Callback]:
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_named": cls}
    return type(cls.__name__, (cls, *bases), named) if bases else cls
