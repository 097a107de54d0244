# SPDX-License-Identifier: Apache-2.0
"""Modules computed again: each mistake in an attention, a norm, a product or a lookup has its cause, and no other."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain import replay  # noqa: E402  after the check for numpy
from anyrank.explain.explain import Answer, explain
from anyrank.explain.replay import attention as a
from anyrank.explain.replay import changes, norms
from anyrank.explain.tensors import Array, Case, Copy, Name, Runs

B, S, H, K, D = 3, 16, 4, 2, 8
WIDTH = H * D
RANDOM = np.random.default_rng(0)
X, Q = RANDOM.normal(size=(B, S, WIDTH)).astype(np.float32), 2.0 * RANDOM.normal(size=(B, S, WIDTH)).astype(np.float32)
KEYS, VALUES = (RANDOM.normal(size=(B, S, K * D)).astype(np.float32) for _ in range(2))
WEIGHT, BIAS = RANDOM.normal(size=(WIDTH, WIDTH)).astype(np.float32), RANDOM.normal(size=WIDTH).astype(np.float32)
GAIN = (1.0 + 0.1 * RANDOM.normal(size=WIDTH)).astype(np.float32)


def case_of(name: str, reference: Array, other: Array, around: dict[str, Array], mesh: dict[str, int] | None = None,
            copies: tuple[Copy, ...] = ()) -> Case:
    reference, other = reference.astype(np.float32), other.astype(np.float32)
    whole = tuple(slice(0, n) for n in reference.shape)
    dump = {**around, name: reference}
    return Case(Name.of(name), reference, other, copies or (Copy(0, (whole,), (other,)),),
                Runs(dump, {}, mesh=mesh or {}, batch=B, seq=S), 1e-6 * float(np.abs(reference).max()))


# --- attention --------------------------------------------------------------------------------------------------------

HEADS = a.Heads(Q.reshape(B, S, H, D), KEYS.reshape(B, S, K, D), VALUES.reshape(B, S, K, D))
ROPE = a.Turn(1e4 ** (-np.arange(0, D, 2) / D))
BASE = a.Recipe(D ** -0.5, a.mask(S, S, 0), ROPE)
ATTENTION = {"b.0.attn.q_proj:fwd": Q, "b.0.attn.k_proj:fwd": KEYS, "b.0.attn.v_proj:fwd": VALUES,
             "b.0.attn.out.weight:init": WEIGHT, "b.0.attn.out.bias:init": BIAS}
DOCUMENTS = np.where(np.arange(S) < 6, 0, 6)[None].repeat(B, 0)
PART: typing.Any = np.arange(S) // (S // 2)


def attention(recipe: a.Recipe, heads: a.Heads = HEADS) -> Array:
    shape = Case(Name("", "fwd", 1), X, X, (), Runs())
    return a.everything(a.Target(shape, WEIGHT.T.astype(np.float64), BIAS.astype(np.float64)), heads, recipe)


def turned(**fields: typing.Any) -> a.Recipe:
    return dataclasses.replace(BASE, turn=dataclasses.replace(ROPE, **fields))


def recipe(**fields: typing.Any) -> a.Recipe:
    return dataclasses.replace(BASE, **fields)


ATTENTIONS = (
    ("causal_mask", recipe(seen=a.mask(S, S, None))),
    ("causal_mask", recipe(seen=a.mask(S, S, 1))),
    ("attention_window", recipe(seen=a.mask(S, S, 0, 5))),
    ("document_boundaries", recipe(seen=a.mask(S, S, 0, 0, DOCUMENTS))),
    ("attention_softmax", recipe(softmax="after")),
    ("attention_softmax", recipe(softmax="zero")),
    ("attention_softmax", recipe(softmax="queries")),
    ("keys_masked", recipe(softmax="inverted")),
    ("softmax_scale", recipe(scale=1.0)),
    ("softmax_scale", recipe(scale=0.777)),
    ("softcap", recipe(cap=1.5)),
    ("alibi_slopes", recipe(slopes=changes.slopes_of(H))),
    ("rope_turn", recipe(turn=None)),
    ("rope_turn", turned(sides=(1, 0, 0))),
    ("rope_turn", turned(sides=(1, 1, 1))),
    ("rope_turn", turned(sides=(-1, -1, 0))),
    ("rope_pairing", turned(halves=(False, False))),
    ("rope_settings", turned(frequencies=5e5 ** (-np.arange(0, D, 2) / D))),
    ("rope_settings", turned(frequencies=777.0 ** (-np.arange(0, D, 2) / D))),
    ("rope_settings", turned(frequencies=1e4 ** (-np.arange(0, 6, 2) / 6))),
    ("positions", turned(frequencies=2.0 * ROPE.frequencies)),
    ("positions", turned(q_positions=np.arange(S) + 3)),
    ("positions", turned(q_positions=np.arange(S) % 8, k_positions=np.arange(S) % 8)),
    ("slices_reordered", recipe(order=(3, 2, 1, 0))),
    ("slices_reordered", recipe(order=(0, 2, 1, 3))),
    ("keys_masked", recipe(seen=a.mask(S, S, 0, hidden=np.isin(np.arange(S), (4, 5))[None]))),
    ("dimension_flattened", recipe(joined="lanes")),
    ("transposed", recipe(joined="unmoved")),
    ("ring_attention", recipe(seen=a.mask(S, S, 0) & (PART[:, None] == PART[None, :])[None])),
    ("ring_attention", recipe(seen=(a.mask(S, S, 0) & (PART[:, None] == PART)) | (PART[:, None] < PART))),
    ("ring_attention", recipe(softmax="home", chunks=PART)),
    ("ring_attention", recipe(softmax="apart", chunks=PART)),
)


def of_attention(other: Array) -> Answer:
    return explain(case_of("b.0.attn.out:fwd", attention(BASE), other, ATTENTION, {"cp": 2}))


def test_attention() -> None:
    for cause, wrong in ATTENTIONS:
        answer = of_attention(attention(wrong))
        assert answer.cause == cause, (cause, answer)


def test_attention_with_other_values() -> None:
    exchanged = a.Heads(HEADS.q, HEADS.v, HEADS.k)
    assert of_attention(attention(BASE, exchanged)).cause == "other_module"
    tiled = a.Heads(HEADS.q, HEADS.k[:, :, [0, 1, 0, 1]], HEADS.v[:, :, [0, 1, 0, 1]])
    assert of_attention(attention(BASE, tiled)).cause == "wrong_kv_head"


def test_attention_that_no_change_explains_is_unknown() -> None:
    two = dataclasses.replace(turned(halves=(False, False)), scale=0.5, seen=a.mask(S, S, 1))
    assert of_attention(attention(two)).cause == "unknown"
    noise = attention(BASE) + 0.1 * RANDOM.normal(size=(B, S, WIDTH))
    assert of_attention(noise).cause == "unknown"


def test_gradients_of_own_queries() -> None:
    """The gradient of a bias of k or v is what the output's sum changes by, as all keys' or values' feature does."""
    given, step = RANDOM.normal(size=(B, S, WIDTH)), 1e-5
    identity = a.Target(Case(Name("", "fwd", 1), X, X, (), Runs()), np.eye(WIDTH))

    def gradient(role: str, tokens: Array) -> Array:
        found = []
        for i in range(K * D):
            way = step * np.outer(tokens, np.eye(K * D)[i]).reshape(S, K, D)
            ends = [a.everything(identity, dataclasses.replace(HEADS, **{role: getattr(HEADS, role) + by}), BASE)
                    for by in (way, -way)]
            found.append(((ends[0] - ends[1]) * given)[:, tokens].sum() / (2.0 * step))
        result: Array = np.array(found)
        return result

    around = {**ATTENTION, "b.0.attn.out:fwd": attention(BASE), "b.0.attn.out:bwd": given.astype(np.float32)}
    for role in ("k", "v"):
        name, whole = f"b.0.attn.{role}_proj.bias:grad", gradient(role, np.ones(S, bool))
        own = gradient(role, PART == 0) + gradient(role, PART == 1)
        assert explain(case_of(name, whole, own, around, {"cp": 2})).cause == "missing_reduce_scatter"
        assert explain(case_of(name, whole, gradient(role, PART == 0), around, {"cp": 2})).cause == "unknown"


    x = RANDOM.normal(size=(B, S, 3)).astype(np.float32)

    def of_weight(x: Array) -> Array:
        def end(by: Array) -> Array:
            return a.everything(identity, dataclasses.replace(HEADS, v=HEADS.v + by.reshape(HEADS.v.shape)), BASE)

        ways = (step * x[..., None, c] * np.eye(K * D)[i] for i in range(K * D) for c in range(3))
        found: Array = np.array([((end(way) - end(-way)) * given).sum() for way in ways]).reshape(K * D, 3)
        found /= 2.0 * step
        return found

    around = {"x:fwd": x, **around}
    hops = of_weight(np.roll(x, S // 2, axis=1))  # the gradients of the other rank's values, for its own
    case = case_of("b.0.attn.v_proj.weight:grad", of_weight(x), hops, around, {"cp": 2})
    assert explain(case).cause == "ring_attention"


def test_latent_attention() -> None:
    q, kv, shared = (RANDOM.normal(size=(B, S, n)).astype(np.float32) for n in (H * 10, H * 12, 6))
    k = np.concatenate([kv.reshape(B, S, H, 12)[..., :4], np.repeat(shared[:, :, None], H, 2)], -1)
    heads = a.Heads(q.reshape(B, S, H, 10), k, kv.reshape(B, S, H, 12)[..., 4:])
    around = {"m.q_proj:fwd": q, "m.kv_proj:fwd": kv, "m.shared:fwd": shared, "m.out.weight:init": WEIGHT,
              "m.out.bias:init": BIAS}
    turn = a.Turn(300.0 ** (-np.arange(0, 6, 2) / 6), last=True)
    right = a.Recipe(10 ** -0.5, a.mask(S, S, 0), turn)
    for cause, wrong in (("softmax_scale", dataclasses.replace(right, scale=0.5)), ("rope_pairing", dataclasses.replace(
            right, turn=dataclasses.replace(turn, halves=(True, False))))):
        case = case_of("m.out:fwd", attention(right, heads), attention(wrong, heads), around)
        assert explain(case).cause == cause


def test_packed_heads_cut_otherwise() -> None:
    packed = np.concatenate([HEADS.q, HEADS.k, HEADS.v], axis=2)
    grouped = packed.reshape(B, S, K, -1, D)
    cut = a.Heads(grouped[..., :-2, :].reshape(B, S, H, D), grouped[..., -2, :], grouped[..., -1, :])
    around = {"b.0.attn.qkv:fwd": packed.reshape(B, S, -1), "b.0.attn.out.weight:init": WEIGHT,
              "b.0.attn.out.bias:init": BIAS}
    case = case_of("b.0.attn.out:fwd", attention(BASE), attention(BASE, cut), around)
    assert explain(case).cause == "packed_cut_as_one"


def test_padding_that_is_attended_to() -> None:
    hidden = np.arange(S)[None] >= np.array([[S], [S - 3], [S - 5]])
    padded = recipe(turn=None, seen=a.mask(S, S, None, hidden=hidden))
    for other, cause in ((a.mask(S, S, None), "keys_masked"), (a.mask(S, S, 0), "unknown")):
        wrong = dataclasses.replace(padded, seen=other)
        answer = explain(case_of("b.0.attn.out:fwd", attention(padded), attention(wrong), ATTENTION))
        assert answer.cause in (cause, "causal_mask"), answer


def test_tables_of_angles() -> None:
    places, frequencies = np.arange(S), np.tile(ROPE.frequencies, 2)
    slow = np.where(frequencies < 0.05, 0.125, 1.0) * frequencies
    wrongs: typing.Any = (("rope_settings", places, frequencies / 4), ("rope_settings", places, slow),
              ("positions", places + 5, frequencies),
              ("rope_settings", places, np.tile(5e5 ** (-np.arange(0, D, 2) / D), 2)),
              ("positions", places % 8, frequencies))
    right: typing.Any = np.outer(places, frequencies)[None].astype(np.float32)
    for cause, at, by in wrongs:
        wrong: typing.Any = np.outer(at, by)[None].astype(np.float32)
        case = case_of("rope:fwd", np.cos(right), np.cos(wrong), {})
        case.runs.reference = {"rope:fwd": np.cos(right), "rope.1:fwd": np.sin(right)}
        case.runs.other = {"rope:fwd": np.cos(wrong), "rope.1:fwd": np.sin(wrong)}
        assert explain(case).cause == cause, cause


def test_features_that_are_turned() -> None:
    turn = dataclasses.replace(ROPE, q_positions=np.maximum(np.arange(S) - 5, 0))
    whole = [np.stack([a.turned(x.astype(np.float64), t, 0, 0, np.arange(S)) for x in HEADS.q]).reshape(B, S, -1)
             for t in (ROPE, turn)]
    assert explain(case_of("q:fwd", whole[0], whole[1], {})).cause == "positions"


# --- norms ------------------------------------------------------------------------------------------------------------

ROWS = norms.units_of(X.shape, (-1,))
NORM = norms.Recipe(0.05 * X.astype(np.float64), ROWS, GAIN.astype(np.float64), np.zeros(1), 1e-5, False)
NORMS: tuple[tuple[str, dict[str, typing.Any]], ...] = (
    ("norm_epsilon", {"eps": 1e-6}),
    ("norm_epsilon", {"how": "outside", "eps": 1e-3}),
    ("norm_statistic", {"centred": True}),
    ("norm_gain", {"plus": 1.0}),
    ("norm_gain", {"power": 0}),
    ("norm_statistic", {"less": 1.0}),
    ("norm_statistic", {"padding": 32}),
    ("norm_statistic", {"how": "largest", "eps": 0.0}),
    ("norm_statistic", {"units": norms.units_of(X.shape, (-1,), 2)}),
    ("norm_missing", {"how": "skipped"}),
)


def test_norms() -> None:
    around = {"embed:fwd": NORM.x.astype(np.float32), "norm.weight:init": GAIN}
    for cause, fields in NORMS:
        wrong = norms.output(dataclasses.replace(NORM, **fields))
        answer = explain(case_of("norm:fwd", norms.output(NORM), wrong, around))
        assert answer.cause == cause, (cause, answer)


def test_batch_norm_of_own_samples() -> None:
    x = RANDOM.normal(size=(4, 6, 5, 5))
    gain = np.arange(1.0, 7.0).reshape(1, 6, 1, 1)
    right = norms.Recipe(x, norms.units_of(x.shape, (0, 2, 3)), gain, np.zeros(1), 1e-5, True)
    own = norms.units_of(x.shape, (2, 3), 2, 0)
    for cause, way in (("statistic_of_own_samples", dataclasses.replace(right, units=own)),
                       ("norm_statistic", dataclasses.replace(right, parts=own))):
        case = case_of("bn:fwd", norms.output(right), norms.output(way), {
            "conv:fwd": x.astype(np.float32), "bn.weight:init": gain.reshape(-1).astype(np.float32)}, {"dp": 2})
        assert explain(case).cause == cause


def test_residual_sums_before_a_norm() -> None:
    branch = RANDOM.normal(size=X.shape)
    around = {"embed:fwd": X, "b.0.attn:fwd": branch.astype(np.float32), "norm.weight:init": GAIN}
    right = norms.output(dataclasses.replace(NORM, x=X + branch))
    for cause, x in (("residual", X), ("residual", branch), ("residual_scale", X + 0.3 * branch)):
        wrong = norms.output(dataclasses.replace(NORM, x=x))
        assert explain(case_of("norm:fwd", right, wrong, around)).cause == cause
    after = norms.output(dataclasses.replace(NORM, x=NORM.x + branch))
    behind = case_of("norm:fwd", norms.output(NORM), after, {"embed:fwd": NORM.x.astype(np.float32),
                                                             "norm.weight:init": GAIN})
    later = {"b.0.attn:fwd": branch.astype(np.float32)}
    behind.runs.reference, behind.runs.other = {**behind.runs.reference, **later}, later
    assert explain(behind).cause == "other_input"


def test_a_statistic_without_a_gradient() -> None:
    d, y = RANDOM.normal(size=X.shape), (norms.output(NORM) - NORM.shift) / GAIN
    right = d - y * (d * y).sum(-1, keepdims=True) / (y * y).sum(-1, keepdims=True)
    around = {"norm.weight:init": GAIN, "norm:fwd": norms.output(NORM).astype(np.float32)}
    for cause, other in (("norm_statistic_detached", d), ("unknown", right + RANDOM.normal(size=X.shape))):
        assert explain(case_of("norm:bwd", right, other, around)).cause == cause


# --- products and tables ----------------------------------------------------------------------------------------------

LINEAR = {"up:fwd": X, "other:fwd": Q, "n.norm:fwd": X, "fc.weight:init": WEIGHT, "fc.bias:init": BIAS,
          "gate.weight:init": 2.0 * WEIGHT[::-1].copy()}
RIGHT = X @ WEIGHT.T + BIAS


PRODUCTS = (
    ("bias_counted_again", RIGHT + BIAS), ("bias_counted_again", RIGHT - BIAS),
    ("transposed", X @ WEIGHT + BIAS), ("other_module", X @ LINEAR["gate.weight:init"].T + BIAS),
    ("other_input", Q @ WEIGHT.T + BIAS), ("unknown", Q @ WEIGHT + BIAS))


def test_products() -> None:
    for cause, wrong in PRODUCTS:
        assert explain(case_of("fc:fwd", RIGHT, wrong, LINEAR)).cause == cause


def test_stale_weights_of_a_product() -> None:
    around = {**LINEAR, "fc.weight:new": WEIGHT + 0.01, "fc.bias:new": BIAS, "up:fwd@2": X}
    case = case_of("fc:fwd@2", X @ (WEIGHT + 0.01).T + BIAS, RIGHT, around)
    assert explain(case).cause == "stale_weights"


def test_every_cause_has_patterns() -> None:
    assert all(cause.kinds and cause.sentence for cause in replay.CAUSES)
