#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plans the published training runs of docs/evidence/planner-runs.tsv and writes what the planner predicts.

    scripts/planner_runs.py build/anyrank [--write | --check | --fitted | --best]

A row is a run in 16 bits whose GPU, model, batch and whole layout are published. Rows are sorted by name; every second
one, from the first on, is fitted to, and the others test. The summary is of both halves.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/evidence/planner-runs.tsv"
GIVEN = ["run", "model", "cluster", "layout", "gpus", "batch", "seq", "seconds"]
MADE = ["half", "predicted", "mfu", "mfu_predicted", "error"]


def config(model, folder):
    """The config of a bundled name, or of family:layers:hidden:ffn:heads:kv_heads:vocab."""
    if ":" not in model:
        return model
    family, *sizes = model.split(":")
    layers, hidden, ffn, heads, kv_heads, vocab = map(int, sizes)
    if family == "gpt":
        fields = {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_inner": ffn, "n_head": heads,
                  "vocab_size": vocab, "n_positions": 1 << 17, "tie_word_embeddings": True}
    else:
        fields = {"model_type": {"llama": "llama", "stack": "anyrank-stack"}[family], "num_hidden_layers": layers,
                  "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
                  "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 1 << 17}
    if family == "stack":
        fields.update(causal=True, hidden_act="gelu_tanh", layer_norm_eps=1e-5)
    path = folder / model.replace(":", "-")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    return path


def options(layout, gpus):
    """tp=8 pp=4 v=5 sp zero=1 micro=64 -> options of the command; dp is what remains."""
    names = {"tp": "--tp", "pp": "--pp", "cp": "--cp", "v": "--virtual-stages", "zero": "--zero",
             "micro": "--micro-batches", "overlap": "--overlap", "recompute": "--recompute",
             "every": "--recompute-every", "system": "--system"}
    words, remaining = [], gpus
    for word in layout.split():
        name, _, value = word.partition("=")
        words += [names[name], value] if value else [f"--{name}"]
        remaining //= int(value) if name in ("tp", "pp", "cp") else 1
        if name == "v" and int(value) > 1:
            words += ["--schedule-pp", "interleaved"]
        if name == "cp":
            words += ["--zigzag"]
    return words + ["--dp", str(remaining)] + ([] if "overlap=" in layout else ["--overlap", "1"])


def plan(binary, row, folder):
    command = [binary, "plan", config(row["model"], folder), "--cluster", row["cluster"], "--batch", row["batch"],
               "--seq", row["seq"], *options(row["layout"], int(row["gpus"])), "--quiet", "--json", "-"]
    process = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if process.returncode != 0:
        raise SystemExit(f"{row['run']}: {process.stderr}")
    return json.loads(process.stdout)["layouts"][0]


def beside_best(binary, rows, folder):
    """How much longer each model's first published layout takes than the fastest that is found, both by the planner. A
    search chooses how many chunks overlap for its first layout, so the published one takes its best number too."""
    seen, shares = set(), []
    for row in rows:
        if (row["model"], row["cluster"]) in seen or "recompute=full" in row["layout"]:
            continue
        seen.add((row["model"], row["cluster"]))
        words = [word for word in row["layout"].split() if not word.startswith(("overlap", "system"))]
        chunks = [f"overlap={chunk}" for chunk in (1, 2, 4, 8)] if "sp" in words else [""]
        seconds = min(plan(binary, dict(row, layout=" ".join([*words, chunk])), folder)["seconds"] for chunk in chunks)
        command = [binary, "plan", config(row["model"], folder), "--cluster", row["cluster"], "--batch", row["batch"],
                   "--seq", row["seq"], "--gpus", row["gpus"], "--quiet", "--json", "-",
                   *[f"--{word}" for word in words if word == "no-flash"]]
        found = json.loads(subprocess.run([str(word) for word in command], capture_output=True, text=True).stdout)
        fits = [layout for layout in found["layouts"] if layout["fits"]]
        fastest = min(layout["seconds"] for layout in fits)
        shares.append(100 * seconds / fastest - 100)
        print(f"{row['run']:44} {shares[-1]:+6.1f} %  first: {fits[0]['name']}", flush=True)
    counts = [sum(share <= limit for share in shares) for limit in (5, 10)]
    print(f"{len(shares)} models: {counts[0]} within 5 %, {counts[1]} within 10 %")


def read(path):
    lines = path.read_text().splitlines()
    about = [line for line in lines if line.startswith("#")]
    titles, *rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return about, sorted((dict(zip(titles, row)) for row in rows), key=lambda row: row["run"])


def summary(rows, half):
    errors = [abs(float(row["error"].split()[0])) for row in rows if row["half"] == half]
    counts = [sum(error <= limit for error in errors) for limit in (10, 20)]
    return f"{half}: {len(errors)} runs, {counts[0]} within 10 %, {counts[1]} within 20 %"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--write", action="store_true", help="write the predictions into the table")
    parser.add_argument("--check", action="store_true", help="fail unless the table has these predictions")
    parser.add_argument("--fitted", action="store_true", help="plan the fitted half alone, with the parts of its time")
    parser.add_argument("--best", action="store_true", help="compare published layouts with the fastest that is found")
    asked = parser.parse_args()
    about, rows = read(PAGE)
    with tempfile.TemporaryDirectory() as folder:
        if asked.best:
            return beside_best(asked.binary, rows, pathlib.Path(folder))
        for i, row in enumerate(rows):
            row["half"] = "test" if i % 2 else "fitted"
            if asked.fitted and i % 2:
                continue
            layout = plan(asked.binary, row, pathlib.Path(folder))
            share = layout["seconds"] / float(row["seconds"])
            row.update(predicted=f"{layout['seconds']:.3g}", mfu=f"{100 * layout['mfu'] * share:.1f}",
                       mfu_predicted=f"{100 * layout['mfu']:.1f}", error=f"{100 / share - 100:+.1f} %")
            print(f"{row['half']:6} {row['run']:44} {row['mfu']:>5} {row['mfu_predicted']:>5} {row['error']:>8}")
            if asked.fitted:
                parts = layout["time"]["production"]
                print("       ", {k: round(v / layout["seconds"], 3) for k, v in parts.items()
                                  if isinstance(v, float) and v > 0})
    for half in ("fitted",) if asked.fitted else ("fitted", "test"):
        print(summary([row for row in rows if row.get("error")], half))
    lines = about + ["\t".join(GIVEN + MADE)] + ["\t".join(row.get(name, "") for name in GIVEN + MADE) for row in rows]
    text = "\n".join(lines) + "\n"
    if asked.check and text != PAGE.read_text():
        raise SystemExit(f"{PAGE.name} has other predictions: --write writes them")
    if asked.write and not asked.fitted:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
