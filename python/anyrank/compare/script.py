# SPDX-License-Identifier: Apache-2.0
"""Watches a training script from inside its process: finds the model, captures the first steps, and ends the process.

`anyrank compare` starts the script unchanged. Python's start-up (hook/sitecustomize.py) calls begin(), which waits
until the script imports torch and then wraps a few of torch's functions. The first training call of a module that an
optimizer updates starts an anyrank.capture.Capture. The process ends when the chosen steps are captured.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import sys
import time
import traceback
import typing

if typing.TYPE_CHECKING:
    import types

    from torch import nn

    from anyrank.compare._capture import ScriptCapture

COMPLETE = 0  # exit status of a process whose steps are captured
LAUNCHERS = ("torch.distributed.", "accelerate.commands.", "deepspeed.launcher.")  # modules run by python -m
FRAMEWORKS = ("transformers.trainer", "lightning", "pytorch_lightning", "accelerate", "deepspeed")
NAMES = 6  # classes of modules that a report lists


class Settings(typing.NamedTuple):
    """What the command asks of each process of a run. It travels as JSON in the environment."""

    dump: str  # folder that the capture writes
    reports: str  # folder for one report of each process, in JSON
    steps: int  # number of steps to capture
    first_step: int  # number of the first step
    to_the_end: bool  # the script continues after the captured steps
    capture: dict[str, typing.Any]  # further arguments of anyrank.capture
    weights: str | None  # dump whose initial weights replace the model's; None: the script's own weights

    def text(self) -> str:
        return json.dumps(self._asdict())


def begin(settings_text: str) -> None:
    """Prepares this process. It does not import torch: the script may never do so."""
    watcher = Watcher(Settings(**json.loads(settings_text)))
    sys.meta_path.insert(0, _AfterImport({
        "torch": watcher.wrap_torch, "torch.distributed.distributed_c10d": watcher.wrap_distributed,
        "torch.distributed.pipelining.schedules": watcher.wrap_schedules,
        "torch.multiprocessing.spawn": watcher.wrap_spawn,
        "lightning.pytorch.strategies.strategy": wrap_lightning,
        "pytorch_lightning.strategies.strategy": wrap_lightning}))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as that module has been imported."""

    def __init__(self, functions: dict[str, typing.Callable[[typing.Any], None]]) -> None:
        self.functions = functions

    def find_spec(self, name: str, path: typing.Any = None, target: typing.Any = None) -> typing.Any:
        if name not in self.functions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            original(module)
            function = self.functions.pop(name, None)  # importlib.util.find_spec gets here without an import
            if function is not None:
                function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Watcher:
    """The state of one process of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started = time.time()
        self.optimizers: list[typing.Any] = []
        self.rejected: set[tuple[int, int]] = set()  # (id of a module, number of optimizers) that is no model
        self.called: list[str] = []  # classes of modules that were called with gradients, for the report
        self.capture: ScriptCapture | None = None
        self.model_names: list[str] = []  # classes of the captured models
        self.notes: list[str] = []
        self.error: str | None = None
        self.process = os.getpid()
        self.restore: typing.Callable[[], None] | None = None

    # --- torch's functions --------------------------------------------------------------------------------------------

    def wrap_torch(self, torch: typing.Any) -> None:
        """Watches optimizers that are made and modules that are called."""
        optimizer_init, module_call = torch.optim.Optimizer.__init__, torch.nn.Module.__call__
        watcher = self

        def init(optimizer: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> None:
            optimizer_init(optimizer, *args, **kwargs)
            watcher.optimizers.append(optimizer)

        def call(module: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            if not torch.compiler.is_compiling() and torch.is_grad_enabled():
                watcher.before_call(module)
            return module_call(module, *args, **kwargs)

        def restore() -> None:
            torch.nn.Module.__call__ = module_call

        torch.optim.Optimizer.__init__, torch.nn.Module.__call__ = init, call
        self.restore = restore
        hook = sys.excepthook

        def on_exception(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
            self.fail("".join(traceback.format_exception(kind, error, trace)))
            hook(kind, error, trace)

        sys.excepthook = on_exception
        import atexit
        atexit.register(self.finish)

    def wrap_distributed(self, distributed: typing.Any) -> None:
        """Replaces NCCL where there is no GPU, and ends the capture before the process group is destroyed."""
        import torch
        init, destroy = distributed.init_process_group, distributed.destroy_process_group

        def init_process_group(backend: typing.Any = None, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            if isinstance(backend, str) and "nccl" in backend and not torch.cuda.is_available():
                self.notes.append(f"the script asks for the backend {backend!r}; this machine has no GPU, so it gets "
                                  "'gloo'")
                backend = "gloo"
                kwargs.pop("device_id", None)
            return init(backend, *args, **kwargs)

        def destroy_process_group(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            self.end_capture()
            return destroy(*args, **kwargs)

        modules: list[typing.Any] = [distributed, sys.modules.get("torch.distributed")]
        for module in modules:
            if module is not None:
                module.init_process_group, module.destroy_process_group = init_process_group, destroy_process_group

    def wrap_schedules(self, schedules: typing.Any) -> None:
        """Watches the pipelines' schedules, whose step is a model's training call."""
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            kind = getattr(schedules, name, None)
            if kind is not None:
                kind.step = self._watched_step(kind.step)

    def _watched_step(self, original: typing.Callable[..., typing.Any]) -> typing.Callable[..., typing.Any]:
        def step(schedule: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            import torch
            if torch.is_grad_enabled():
                if self.capture is None:
                    self.start_capture(schedule, [type(schedule).__name__])
                else:
                    self.capture.end_updated_step()
            return original(schedule, *args, **kwargs)

        return step

    def wrap_spawn(self, spawning: typing.Any) -> None:
        """Notes that the script starts its own ranks."""
        original = spawning.start_processes

        def start_processes(function: typing.Any, args: typing.Any = (), nprocs: int = 1, *rest: typing.Any,
                            **kwargs: typing.Any) -> typing.Any:
            self.report(spawned=nprocs)
            return original(function, args, nprocs, *rest, **kwargs)

        spawning.start_processes = start_processes

    # --- the model ----------------------------------------------------------------------------------------------------

    def before_call(self, module: nn.Module) -> None:
        """Starts the capture if this call is the first training call of a model."""
        if self.capture is not None or self.error is not None:
            return
        key = (id(module), len(self.optimizers))
        if key in self.rejected:
            return
        if len(self.called) < NAMES and type(module).__name__ not in self.called and next(module.parameters(), None) \
                is not None:
            self.called.append(type(module).__name__)
        if type(module).__module__.startswith("deepspeed.") and hasattr(module, "optimizer"):
            self.start_capture(module, [type(module.module).__name__])
            return
        updated = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups
                   for p in group["params"]}
        if not any(id(p) in updated for p in module.parameters()):
            self.rejected.add(key)
            return
        roots = _roots(module, updated)
        self.start_capture(roots[0] if len(roots) == 1 else _together(roots),
                           [type(_inner(root)).__name__ for root in roots])

    def start_capture(self, model: typing.Any, names: list[str]) -> None:
        import torch.distributed as dist

        from anyrank._errors import AnyrankError
        from anyrank.compare._capture import ScriptCapture

        if self.restore is not None:
            self.restore()
        self.model_names = names
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1 and not (dist.is_available() and dist.is_initialized()):
            self.refuse(f"the script trains on {world} ranks without a process group: each rank trains alone. It has "
                        "to call torch.distributed.init_process_group, or a framework that does")
        settings = self.settings
        try:
            if settings.weights is not None:
                from anyrank.compare._weights import load_weights
                load_weights(model, settings.weights)
            self.capture = ScriptCapture(self, model, settings.dump, first_step=settings.first_step, steps=range(
                settings.first_step, settings.first_step + settings.steps), **settings.capture)
            self.capture.start()
            self.report()
        except AnyrankError as error:
            self.refuse(str(error))

    # --- the end ------------------------------------------------------------------------------------------------------

    def on_step(self, step: int) -> None:
        """Called when a step has been captured."""
        self.report(step=step)

    def on_complete(self) -> None:
        """Called when all steps are captured: ends the process, unless the script is to continue."""
        self.report()
        if not self.settings.to_the_end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(COMPLETE)

    def end_capture(self) -> None:
        if self.capture is not None and self.error is None:
            self.capture.stop()

    def finish(self) -> None:
        """Called when the script ends by itself."""
        if os.getpid() == self.process:
            if getattr(sys, "last_type", None) is None:
                try:
                    self.end_capture()
                except Exception as error:  # the report says it: an exception at exit changes no exit status
                    self.fail(f"{type(error).__name__}: {error}")
            self.report(ended=True)

    def is_launcher(self) -> bool:
        """Returns whether this process only starts ranks, as torchrun's does."""
        main = getattr(sys.modules.get("__main__"), "__spec__", None)
        return main is not None and main.name.startswith(LAUNCHERS)

    def refuse(self, text: str) -> None:
        """Ends all ranks, because the model cannot be captured."""
        self.error = text
        self.report(refused=text)
        sys.stderr.flush()
        os._exit(2)

    def fail(self, text: str) -> None:
        self.error = text
        self.report(failed=text)

    def report(self, **facts: typing.Any) -> None:
        """Writes what is known of this process to a file of its own, which replaces the one before."""
        capture = self.capture
        rank = os.environ.get("RANK")
        if self.is_launcher():
            return
        if capture is not None:
            rank = str(capture.rank())
        elif rank is None and facts.keys() & {"spawned"}:
            rank = "launcher"
        known = {"rank": rank or "0", "models": self.model_names, "called": self.called, "seconds": time.time() -
                 self.started, "time": time.time(), "optimizers": [type(o).__name__ for o in self.optimizers],
                 "frameworks": [name for name in FRAMEWORKS if name in sys.modules],
                 "notes": [*self.notes, *(capture.notes if capture is not None else [])],
                 "passes": capture.passes if capture is not None else 0,
                 "complete": capture is not None and capture.is_complete,
                 "captured_steps": capture.captured_steps if capture is not None else 0,
                 "without_backward": capture is not None and capture.without_backward, **facts}
        path = pathlib.Path(self.settings.reports, f"process-{os.getpid()}.json")
        try:
            if path.exists():
                known = {**json.loads(path.read_text(encoding="utf-8")), **known}
            part = path.with_suffix(".part")
            part.write_text(json.dumps(known), encoding="utf-8")
            part.replace(path)
        except OSError:
            pass  # the command sees that the report is missing


def wrap_lightning(strategies: typing.Any) -> None:
    """Lets Lightning call the LightningModule as a module on one rank too, as its DDP strategy does. Else a run on one
    rank would call only parts of the module, and its samples could not be compared."""
    original = strategies.Strategy.training_step

    def training_step(strategy: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        module = strategy.lightning_module
        if strategy.model is not module or not hasattr(strategy, "_forward_redirection"):
            return original(strategy, *args, **kwargs)
        with strategy.precision_plugin.train_step_context():
            return strategy._forward_redirection(module, module, "training_step", *args, **kwargs)

    strategies.Strategy.training_step = training_step


def _children(module: nn.Module) -> typing.Iterator[nn.Module]:
    return (child for child in module.modules() if child is not module)


def _inner(module: nn.Module) -> nn.Module:
    from anyrank._errors import AnyrankError
    from anyrank.capture._model import unwrapped
    try:
        return unwrapped(module)[0]
    except AnyrankError:
        return module


def _roots(called: nn.Module, updated: set[int]) -> list[nn.Module]:
    """Returns the outermost modules that together hold all parameters that optimizers update. The first one contains
    the called module."""
    from torch import nn

    holders = []
    for value in gc.get_objects():
        try:
            if issubclass(type(value), nn.Module) and any(id(p) in updated for p in value.parameters()):
                holders.append(value)
        except (ReferenceError, AttributeError, RuntimeError):
            pass  # half made, or a proxy of something that is gone
    held = {id(child) for holder in holders for child in _children(holder)}
    outermost = [holder for holder in holders if id(holder) not in held]
    own = [root for root in outermost if any(child is called for child in root.modules())] or [called]
    # Of several wrappers around one module, the one that the script calls, or else the smallest, is the model.
    first = min(own, key=lambda root: (root is not called, sum(1 for _ in root.modules())))
    roots, covered = [first], {id(p) for p in first.parameters()}
    for root in outermost:
        parameters = {id(p) for p in root.parameters()} & updated
        if parameters - covered and not parameters & covered:
            roots.append(root)
            covered |= parameters
    return roots


def _together(roots: list[nn.Module]) -> nn.Module:
    """Combines several models in one module, by the names of the script's variables."""
    from torch import nn

    together = nn.Module()
    frame = sys._getframe(1)
    frames: list[typing.Any] = []
    while frame is not None:
        frames.append(frame)
        frame = typing.cast(typing.Any, frame.f_back)
    for number, root in enumerate(roots):
        names = [name for f in frames for scope in (f.f_locals, f.f_globals) for name, value in scope.items()
                 if value is root and "anyrank" not in f.f_code.co_filename]
        name = next((name for name in names if not name.startswith("_")), type(_inner(root)).__name__.lower())
        together.add_module(name if name not in dict(together.named_children()) else f"{name}{number}", root)
    return together
