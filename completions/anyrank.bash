# SPDX-License-Identifier: Apache-2.0
# Completion of anyrank for bash. Installed as share/bash-completion/completions/anyrank; sourcing it works as well.

_anyrank() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} subcommand=${COMP_WORDS[1]}
    local models="llama-demo gpt2-demo stack-demo"
    local faults="column_dx_not_reduced row_bias_every_rank row_input_grad_not_gathered heads_divided_twice
        allreduce_aliases_input init_local_fan init_per_shard_seed vocab_target_off_by_shard loss_parallel_no_max
        embedding_edge_twice weight_grad_leading_dims bias_grad_wrong_axis norm_backward_missing sp_norm_grad_local
        sp_row_bias_grad_local sp_position_grad_local kv_replica_grad_local kv_replica_wrong_head
        dropout_same_mask_in_shard dropout_different_mask_in_replica dp_mean_of_means dp_sum_of_local_means
        dp_group_missing dp_broadcast_over_world accum_mean_of_means saved_input_overwritten embedding_tied_once
        gradnorm_counts_replicas gradnorm_local_clip group_wrong_stride world_rank_in_group positions_local
        silent_truncation gate_up_interleaved_wrong norm_padded_lanes bias_added_twice row_bias_partial_grad
        init_replica_differs gather_batch_order collective_order_swapped collective_size_mismatch
        collective_dtype_mismatch bucket_first_ready bucket_reduced_twice bucket_not_packed bucket_stale_done
        step_before_copy_back comm_before_producer stale_activation_reuse unused_skips_collective unused_set_empty
        unused_in_last_micro_batch tied_reduced_at_first_use accum_last_only accum_sum_of_means mean_divides_by_world
        dp_init_differs zero_gather_missing zero_shards_misaligned zero_grad_not_recursive gradnorm_first_rank_only
        adam_step_not_synced optimizer_counter_ahead weight_decay_on_shard_only norm_fp16_store"
    local subcommands="check grads train verify reshard bugs bench info"
    local common="--json --quiet --no-color --threads --seed --help --version"
    local layout="--tp --mlp-order --collectives --timeout --numerics --device"
    local watch="--trace --timeline --cluster"
    local transport="--transport --share-gpus"
    local split="--sp --keep-gathered --dp --micro-batches --forward-first"
    local ddp="--zero --bucket-bytes --bucket-mode --find-unused"
    local optimizer="--optimizer --lr --lr-schedule --warmup --min-lr --momentum --nesterov --betas --weight-decay
        --decay --group"
    local options="$common" names=""
    COMPREPLY=()

    # bash splits --name=value at the sign.
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "$subcommands help --help --version" -- "$current")
        return
    fi
    case $subcommand in
        check)
            options="$layout --precision $split $ddp --sweep --batch --seq --text --steps $optimizer --clip --dropout --inject --gradcheck --skip-f64 --memory --list-tensors --dump
                $transport $watch --schedule --net-fault --verify-transfers $common"
            names=$models ;;
        grads) options="$layout --precision --sensitivity --sensitivity-of $split $ddp $watch --input --block --out --per-rank --activations --inject $common" names=$models ;;
        train)
            options="$layout $split $ddp $optimizer --data --data-format --in-order --steps --batch --seq --clip --dropout --storage --loss-scale
                --save --save-every --keep --resume --stop-after --verify-every --plot --log-every --inject $transport $watch $common"
            names=$models ;;
        verify)
            options="--bits --ulp --rtol --atol --sensitivity --map --reference-map --only --ignore --common --no-equal-nan --html --max-report
                --tp --dp --heads --kv-heads $common" ;;
        reshard)
            options="--out --tp --pp --dp --dp-copies --embedding-hidden --pad-vocab --shard-size --map --config --strict --dry-run $common" ;;
        bugs) options="--run --curves --numerics --precision $common" ;;
        bench)
            options="$layout $split --m --n --k --batch --seq --repetitions --ranks --bytes --dtype --algorithm --precision $common"
            names="gemm grad block step ddp allreduce"
            if ((COMP_CWORD > 2)); then names=$models; fi ;;
        info) options="--probe $common" ;;
        help) names=$subcommands options="" ;;
    esac

    case $previous in
        --inject) mapfile -t COMPREPLY < <(compgen -W "$faults" -- "$current"); return ;;
        --dtype) mapfile -t COMPREPLY < <(compgen -W "f32 i64" -- "$current"); return ;;
        --algorithm) mapfile -t COMPREPLY < <(compgen -W "auto direct ring last" -- "$current"); return ;;
        --mlp-order) mapfile -t COMPREPLY < <(compgen -W "column-row row-column" -- "$current"); return ;;
        --collectives) mapfile -t COMPREPLY < <(compgen -W "direct ring" -- "$current"); return ;;
        --sensitivity-of)
            mapfile -t COMPREPLY < <(compgen -W "f32 tf32 bf16 bf16-pure f16 f16-pure" -- "$current"); return ;;
        --precision) mapfile -t COMPREPLY < <(compgen -W "f32 tf32 bf16" -- "$current"); return ;;
        --numerics) mapfile -t COMPREPLY < <(compgen -W "exact native" -- "$current"); return ;;
        --bucket-mode) mapfile -t COMPREPLY < <(compgen -W "overlap eager" -- "$current"); return ;;
        --optimizer) mapfile -t COMPREPLY < <(compgen -W "sgd adam adamw" -- "$current"); return ;;
        --lr-schedule) mapfile -t COMPREPLY < <(compgen -W "constant cosine" -- "$current"); return ;;
        --decay) mapfile -t COMPREPLY < <(compgen -W "all matrices" -- "$current"); return ;;
        --storage) mapfile -t COMPREPLY < <(compgen -W "f32 bf16" -- "$current"); return ;;
        --data-format) mapfile -t COMPREPLY < <(compgen -W "auto bytes u16 u32 safetensors" -- "$current"); return ;;
        --cluster) mapfile -t COMPREPLY < <(compgen -W "a100 h100" -- "$current"); return ;;
        --transport) mapfile -t COMPREPLY < <(compgen -W "sim mpi nccl" -- "$current"); return ;;
        --device) mapfile -t COMPREPLY < <(compgen -W "cpu cuda emulated" -- "$current"); return ;;
        --text | --data | --json | --input | --plot | --trace | --timeline | --sensitivity | --map | --reference-map | --html | --config) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;
        --block | --out | --dump | --save | --resume) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -d -- "$current"); return ;;
        --ulp | --rtol | --atol | --only | --ignore | --max-report | --heads | --kv-heads | --pp | --pad-vocab | --shard-size) return ;;
        --zero | --bucket-bytes | --warmup | --min-lr | --group) return ;;
        --tp | --dp | --micro-batches | --timeout | --schedule | --net-fault | --batch | --seq | --steps | --lr | --momentum | --betas | \
            --weight-decay | --clip | --dropout | --threads | --seed | --m | --n | --k | --repetitions) return ;;
        --ranks | --bytes | --save-every | --keep | --stop-after | --verify-every | --log-every | --loss-scale) return ;;
    esac
    if [[ ($subcommand == verify || $subcommand == reshard) && $current != -* ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        return
    fi
    if [[ $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")
        return
    fi
    mapfile -t COMPREPLY < <(compgen -W "$names" -- "$current")
    if [[ $subcommand == check || $subcommand == grads || $subcommand == train ]]; then
        local folders
        mapfile -t folders < <(compgen -d -- "$current")
        if ((${#folders[@]})); then
            compopt -o filenames 2>/dev/null
            COMPREPLY+=("${folders[@]}")
        fi
    fi
}
complete -F _anyrank anyrank
