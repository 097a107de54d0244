# SPDX-License-Identifier: Apache-2.0
"""Models of the installed transformers under their own tp_plan, ep_plan and fsdp_plan, each against one rank.

    python tests/pytorch/wild.py --anyrank build/anyrank [--only GLOB..] [--folder DIR] [--json FILE]

Needs torch, transformers and safetensors (scripts/install_deps.sh --pytorch). A run is a small model with random weights,
saved, read by from_pretrained on 1 to 4 gloo processes of this machine's CPU, and one step of SGD. A line a run: the same,
rounding, different (the first tensor and its cause), or failed (its message). docs/evidence/found.md has what was found.
"""

import argparse
import fnmatch
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]
os.environ.update(HF_DEACTIVATE_ASYNC_LOAD="1", HF_HUB_OFFLINE="1")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  here once, instead of in each process
import torch.distributed as dist  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402
import transformers  # noqa: E402
import transformers.modeling_utils  # noqa: E402, F401
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import anyrank  # noqa: E402
from forks import fork_ranks  # noqa: E402

BATCH, SEQ = 4, 16
KEPT = ["loss:fwd", "*:init", "*:grad", "*:new"]
# What configurations call their sizes; a family takes those that it has.
SMALL = dict(
    vocab_size=144, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    moe_intermediate_size=32, shared_expert_intermediate_size=64, expert_ffn_hidden_size=32, ffn_hidden_size=128,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2, moe_topk=2,
    n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    index_topk=8, index_n_heads=2, index_head_dim=16, linear_num_key_heads=4, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16,
    global_head_dim=16, num_global_key_value_heads=4, hidden_size_per_layer_input=16, vocab_size_per_layer_input=144,
    layer_types=None, attention_dropout=0.0, hidden_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    residual_dropout=0.0, embedding_dropout=0.0, router_jitter_noise=0.0, input_jitter_noise=0.0)

LAYOUTS = {
    "tp2": dict(tp_size=2), "tp4": dict(tp_size=4), "fsdp2": dict(fsdp_size=2), "fsdp2-tp2": dict(fsdp_size=2, tp_size=2),
    "hsdp2x2": dict(fsdp_size=2, dp_replicate_size=2), "replicas2": dict(dp_replicate_size=2),
    "replicas2-tp2": dict(dp_replicate_size=2, tp_size=2), "fsdp2-ep2": dict(fsdp_size=2, ep_size=2),
    "tp2-ep2": dict(tp_size=2, ep_size=2), "fsdp4-ep2": dict(fsdp_size=4, ep_size=2),
    "tp2-ep2-all-reduce": dict(tp_size=2, ep_size=2, ep_implementation="all_reduce"),
    "fsdp2-tp2-ep2": dict(fsdp_size=2, tp_size=2, ep_size=2), "fsdp2-tp2-ep4": dict(fsdp_size=2, tp_size=2, ep_size=4),
    "hsdp2x2-ep2": dict(fsdp_size=2, dp_replicate_size=2, ep_size=2)}

# Families by the layouts that they are run under, besides tp2; "*2" is two micro-batches.
MORE = {
    "llama": "tp2*2 tp4 fsdp2-tp2", "gemma2": "fsdp2-tp2", "phi3": "tp4 fsdp2-tp2", "olmo2": "tp2*2 tp4",
    "qwen3": "tp2*2 fsdp2-tp2 fsdp2-tp2*2 hsdp2x2 replicas2 replicas2-tp2", "apertus": "fsdp2 fsdp2-tp2",
    "hrm_text": "fsdp2", "youtu": "fsdp2", "llama4_text": "fsdp2", "gemma4_text": "fsdp2 tp4",
    "qwen3_moe": "fsdp2-ep2 tp2-ep2 tp2-ep2-all-reduce fsdp4-ep2 fsdp2-tp2-ep2 fsdp2-tp2-ep4 hsdp2x2-ep2",
    "mixtral": "fsdp2-ep2 hsdp2x2-ep2", "gpt_oss": "tp2*2 tp4 tp2-ep2 fsdp2-tp2", "deepseek_v4": "fsdp2",
    "deepseek_v3": "tp2*2 tp4 fsdp2-tp2 fsdp4-ep2", "qwen3_next": "fsdp2-tp2 tp4", "nemotron_h": "fsdp2 tp4",
    "minimax_m2": "tp2*2 fsdp2-tp2-ep4", "granitemoehybrid": "tp2-ep2", "dots3_note_text": "tp2-ep2"}
FAMILIES = """afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid beam cohere cohere2 cohere2_moe cwm deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 doge dots1 dots3_note_text ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo
    flint gemma2 gemma3_text gemma4_text gemma4_unified_text glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss
    granite_swa granitemoe granitemoehybrid helium hrm_text hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text
    inkling_text internlm3 iquestcoder jais2 jamba kolibri1 laguna llama llama4_text mellum minicpm3 minimax minimax_m2
    minimax_m3_vl_text mixtral nanochat nemotron_h olmo2 olmo_hybrid olmoe phi phi3 phimoe qwen3 qwen3_5_text qwen3_moe
    qwen3_next qwen4_exp_text starcoder2 vaultgemma youtu""".split()


def runs():
    for family in FAMILIES:
        for layout in ["tp2", *MORE.get(family, "").split()]:
            name, _, micro = layout.partition("*")
            yield f"{family} {layout}", family, LAYOUTS[name], int(micro or 1)


def make(family, folder):
    """A small model with random weights, and norms and routers' biases that are no ones and zeros."""
    kind = CONFIG_MAPPING[family]
    has = {*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "__annotations__", ())}
    config = kind(**{name: value for name, value in SMALL.items() if name in has})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * 0.06 + (1 if "norm" in name and name.endswith("weight") else 0))
        for name, b in model.named_buffers():
            if "correction_bias" in name:
                b.copy_(torch.randn(b.shape, generator=draw) * 0.1)
    model.save_pretrained(folder)


def train(folder, dump, rank, world, layout, micro):
    """One step; each rank of dp has its part of the batch, in `micro` micro-batches."""
    config = {"distributed_config": DistributedConfig(**layout)} if world > 1 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32,
                                                              **config).train()
    tp = layout.get("tp_size", 1) if world > 1 else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(3, 140, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    with anyrank.capture(model, dump, only=KEPT):
        for part in ids.chunk(world // tp)[rank // tp].chunk(micro):
            (model(input_ids=part, labels=part, use_cache=False).loss / micro).backward()
        optimizer.step()


def on_ranks(world, dump, function):
    """Whether function(rank) came back well on all ranks; what they print is in DUMP.log.RANK."""
    shutil.rmtree(dump, ignore_errors=True)
    store = tempfile.mktemp(dir=dump.parent)

    def run(rank):
        log = os.open(f"{dump}.log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if world > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        function(rank)
    return fork_ranks(world, run)


def why(dump):
    """The last line of the first traceback of a failed run."""
    for log in sorted(dump.parent.glob(f"{dump.name}.log.*")):
        errors = [line for line in log.read_text(errors="replace").splitlines()
                  if not line.startswith(" ") and line.partition(":")[0].endswith("Error")]
        if errors:
            return errors[0]
    return "no traceback"


def look(anyrank_command, family, layout, micro, folder):
    """Verdict, and what there is to say of it."""
    model, one, other = folder / family, folder / f"{family}-one-{micro}", folder / "other"
    world = layout.get("tp_size", 1) * layout.get("fsdp_size", 1) * layout.get("dp_replicate_size", 1)
    if not model.exists() and not on_ranks(1, folder / f"{family}-made", lambda _: make(family, model)):
        return "failed", "making it: " + why(folder / f"{family}-made")
    if not one.exists() and not on_ranks(1, one, lambda rank: train(model, one, rank, 1, {}, micro)):
        return "failed", "on one rank: " + why(one)
    if not on_ranks(world, other, lambda rank: train(model, other, rank, world, layout, micro)):
        return "failed", why(other)
    report = folder / "report.json"
    rule = ["--rtol", "1e-4", "--atol", "2e-6", *(["--common"] if micro > 1 else [])]
    done = subprocess.run([anyrank_command, "verify", one, other, *rule, "--json", report, "-q"], capture_output=True,
                          text=True)
    if done.returncode not in (0, 1):
        return "failed", done.stderr
    said = json.loads(report.read_text())
    if said["result"] == "same":
        return "same", ""
    first = said["first"]
    return ("rounding" if all(row.get("cause") == "rounding" for row in said["worst"]) else "different",
            f"{first['tensor']}: {first.get('cause')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--anyrank", default="build/anyrank")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="of names such as 'qwen3 fsdp2-tp2'")
    parser.add_argument("--folder", type=pathlib.Path, help="keeps models, dumps and logs")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    folder = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="anyrank-wild-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, family, layout, micro in runs():
        if any(fnmatch.fnmatchcase(name, glob) for glob in args.only):
            verdict, text = look(args.anyrank, family, layout, micro, folder)
            rows.append({"run": name, "verdict": verdict, "text": text})
            print(f"{verdict:10} {name:34} {text}", flush=True)
    print(*(f"{verdict} {sum(row['verdict'] == verdict for row in rows)}" for verdict in
            ("same", "rounding", "different", "failed")), f"of {len(rows)}; torch {torch.__version__}, "
          f"transformers {transformers.__version__}", sep=", ")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
