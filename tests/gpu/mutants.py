# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the GPU's kernels, each of which the conformance suite is to see on the emulated device.

    scripts/mutate.py --table tests/gpu/mutants.py --likely-only

./test --extended does that. What a table is: scripts/mutate.py.
"""

TESTS = "gpu/conformance_main"

# What is wrong, the file, what stands there, what stands there instead.
MUTANTS = [
    ("add: an operand twice", "gpu/elementwise.cu", "ari_add32(left[i], right[i])", "ari_add32(left[i], left[i])"),
    ("bias_act: the first bias for every column", "gpu/elementwise.cu", "bias[i % cols]", "bias[0 * (i % cols)]"),
    ("act_backward: the activation in place of its slope", "gpu/elementwise.cu", "v[0] = to[i] = ari_mul32(slopes[i], ari_dact32(act, from[i]));",
     "v[0] = to[i] = ari_mul32(slopes[i], ari_act32(act, from[i]));"),
    ("act_backward: what is added up is not what is written", "gpu/elementwise.cu",
     "v[0] = to[i] = ari_mul32(slopes[i], ari_dact32(act, from[i]));",
     "to[i] = ari_mul32(slopes[i], ari_dact32(act, from[i]));\n        v[0] = slopes[i];"),
    ("gated_backward: the two biases' sums change places", "gpu/elementwise.cu", "{dgate_bias, dup_bias}",
     "{dup_bias, dgate_bias}"),
    ("dropout: the residual is added to what was there before", "gpu/elementwise.cu",
     "ari_add32(residual[at], kept)", "ari_add32(residual[at], x[at])"),
    ("norm_backward: the offset's gradient is the gain's", "gpu/norm.cu", "v[1] = slopes[i];", "v[1] = v[0];"),
    ("norm_backward: dx before the sums that read what it replaces", "gpu/norm.cu",
     "    if (wanted(dgamma) || wanted(dbeta))\n        AR_TRY(parameter_gradients<centred>(d, q, dy, x, mean, rstd, "
     "dgamma, dbeta));\n    return input_gradient<centred>(d, q, dx, sum, dy, x, mean, rstd, gamma, residual);",
     "    AR_TRY(input_gradient<centred>(d, q, dx, sum, dy, x, mean, rstd, gamma, residual));\n    return "
     "parameter_gradients<centred>(d, q, dy, x, mean, rstd, dgamma, dbeta);"),
    ("dropout: the wrong lane of Philox", "gpu/elementwise.cu", "bits[lane] >= which.threshold",
     "bits[lane ^ 1u] >= which.threshold"),
    ("softmax: a sum of the block's terms alone", "gpu/attention.cu",
     "const size_t keys = of->part.cols;\n    const int32_t p = ari_rowsum_bits(of->seq);\n    return launch_blocks(d, q, "
     "of->part.matrices * of->part.rows, keys, [=] ARI_KERNEL(const block &own) {\n        const ari_score_row r = "
     "rows.row(own.index);\n        float *row",
     "const size_t keys = of->part.cols;\n    const int32_t p = ari_rowsum_bits(keys * keys);\n    return "
     "launch_blocks(d, q, of->part.matrices * of->part.rows, keys, [=] ARI_KERNEL(const block &own) {\n        const "
     "ari_score_row r = rows.row(own.index);\n        float *row"),
    ("softmax: what is known of the row before", "gpu/attention.cu", "const double l = sums[r.at];",
     "const double l = sums[r.at > 0 ? r.at - 1 : 0];"),
    ("packed_part: the first terms of the whole", "gpu/pack.cu", "part.col + k)];", "k)];"),
    ("gemm_i64: added to nothing", "gpu/gemm_exact.cu", "to[1] = add ? ari_add64(to[1], sum.low) : sum.low;",
     "to[1] = sum.low;"),
    ("softmax: the scale after the mask", "gpu/attention.cu",
     "r.additive ? ari_add32(scaled, r.additive[key - r.first]) : scaled",
     "r.additive ? ari_mul32(ari_add32(in[key], r.additive[key - r.first]), scale) : scaled"),
    ("softmax_backward: masked places keep their gradient", "gpu/attention.cu",
     "sees(r, key) ? ari_attention_ds(pr[key], dp[key], sum, scale) : 0.0f",
     "ari_attention_ds(pr[key], dp[key], sum, scale)"),
    ("rope: backward turns forward", "gpu/attention.cu", "^ flip);", "^ (0u * flip));"),
    ("norm_forward: a rounding dropped", "gpu/norm.cu", "static_cast<double>(deviation<centred>(in[j], m));",
     "static_cast<double>(in[j]) - m;"),
    ("norm_backward: two means swapped", "gpu/norm.cu", "ari_layernorm_dx(down, mean_g, mean_product, at, r)",
     "ari_layernorm_dx(down, mean_product, mean_g, at, r)"),
    ("row sums: one bit less", "gpu/kernels.h", "ari_rowsum_value(row_integer(b, n, e, p, term), e, p)",
     "ari_rowsum_value(row_integer(b, n, e, p - 1, term), e, p - 1)"),
    ("ce_backward: the target's neighbour", "gpu/loss.cu", "static_cast<int64_t>(j) == at ?",
     "static_cast<int64_t>(j) == at + 1 ?"),
    ("ce_backward: the z-loss forgotten", "gpu/loss.cu", "ari_ce_weight(ari_ce_lse(m, l), &options);",
     "ari_ce_weight(0.0, &options);"),
    ("ce_terms: the mean over one class too many", "gpu/loss.cu", "/ static_cast<double>(v)",
     "/ static_cast<double>(v + 1)"),
    ("ce_logits: the last logit left out", "gpu/loss.cu", "row_integer(b, v_local, exponents[b.index]",
     "row_integer(b, v_local - (v_local > 0), exponents[b.index]"),
    ("ce_terms: tokens that do not count, counted", "gpu/loss.cu", "valid[i] ? term : 0.0f", "term"),
    ("ce_max: each thread keeps a largest value of its own", "gpu/loss.cu",
     "const int32_t top = b.max(v_local, [&](size_t j) { return ari_key32(x[j]); });",
     "int32_t top = INT32_MIN;\n        b.each(v_local, [&](size_t j) { top = ari_key32(x[j]) > top ? ari_key32(x[j]) "
     ": "
     "top; });"),
    ("ce_sum: threads part at a value of their own", "gpu/loss.cu", "const int64_t total = row_integer(",
     "bool mine = false;\n        b.each(1, [&](size_t) { mine = true; });\n        if (mine)\n            "
     "b.each(1, [&](size_t) { sum[b.index] = 0; });\n        const int64_t total = row_integer("),
    ("rows_in_range: one row too many", "gpu/strided.cu", "row < rows", "row <= rows"),
    ("combine: the other ranks in reverse", "gpu/combine.cu", "N::combined(op, sum, in[k][i])",
     "N::combined(op, sum, in[n - k][i])"),
    ("sum_squares: the upper half twice", "gpu/optimizer.cu", "i == 0 ? high : low", "i == 0 ? high : high + 0 * low"),
    ("round_bits: a bit less", "gpu/elementwise.cu", "ari_f32_to_bits(*from.at(p), bits)",
     "ari_f32_to_bits(*from.at(p), bits - 1)"),
    ("narrow_bf16: cut off in place of rounded", "gpu/elementwise.cu", "y[i] = ari_bf16_of_f32(x[i]);",
     "y[i] = static_cast<uint16_t>(ari_bits32(x[i]) >> 16);"),
    ("optimizer_step: a weight that was set is not taken", "gpu/optimizer.cu", "value = w; /* it was set since */",
     "value = value; /* it was set since */"),
    ("copy_strided: a corner of each tile forgotten", "gpu/strided.cu",
     "const size_t r = i / side, c = i % side;\n            if (",
     "const size_t r = i / side, c = i % side;\n            if (i + 1 < side * side && "),
    ("acc_add: a row that is its own is skipped", "gpu/accumulator.cu", "for (size_t w = own / 32; w < words; w++)",
     "for (size_t w = own / 32 + 1; w < words; w++)"),
    ("acc_add: the last part is not merged", "gpu/sums.h",
     "for (size_t k = 0; k < count; k++) {\n            const exact_sums",
     "for (size_t k = 0; k + 1 < count; k++) {\n            const exact_sums"),
    ("sum_rows_f32: rows in another order", "gpu/sums.h", "e.add(tile[s * TILE + r * COLUMNS + col]);",
     "e.add(tile[s * TILE + (count - 1 - r) * COLUMNS + col]);"),
    ("col_exponents: one of eight runs forgotten", "gpu/exponents.cu", "for (size_t s = 1; s < SPLIT; s++)",
     "for (size_t s = 1; s + 1 < SPLIT; s++)"),
    ("row_exponents: the shift with the wrong sign", "gpu/exponents.cu",
     "ari_contract_shift(c[at * x.shape[3] + k], sign)",
     "ari_contract_shift(c[at * x.shape[3] + k], -sign)"),
    ("pack: the top digit cut to four bits", "gpu/pack.cu", "r.d[3] = q;", "r.d[3] = q & 15;"),
    ("pack: columns of the first matrix for all", "gpu/pack.cu", "c[at * x.shape[3] + k]", "c[k]"),
    ("imma16: a digit's weight halved", "gpu/packed.h", "p[5] * 128", "p[5] * 64"),
    ("imma10: a Karatsuba sum without its high part", "gpu/packed.h", "(both - high - low) * 128", "(both - low) * 128"),
    ("gemm_round: the bias missing", "gpu/gemm_exact.cu", "FINISH && bias ? ari_add32(value, bias[col]) : value",
     "value"),
    ("gemm_acc: the last matrix missing", "gpu/gemm_exact.cu", "for (size_t g = 0; g < x.t.matrices; g++) {",
     "for (size_t g = 0; g + 1 < x.t.matrices; g++) {"),
    ("round_i64: another row's exponent", "gpu/gemm_exact.cu", "const size_t row = start / n + b.index / chunks",
     "const size_t row = start / n + 0 * b.index / chunks"),
    ("gemm_f32: what is added to forgotten", "gpu/gemm_native.cu", "copy_of(d, q, &copied, &of_c, c, add)",
     "copy_of(d, q, &copied, &of_c, c, false)"),
    ("gemm_f32: a column's line for a transposed operand", "gpu/gemm_native.cu", "s = {s.n, s.m, s.k, s.batch};",
     "s = {s.m, s.n, s.k, s.batch};"),
]
