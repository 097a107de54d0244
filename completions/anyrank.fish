# SPDX-License-Identifier: Apache-2.0
# Completion of anyrank for fish. Installed as share/fish/vendor_completions.d/anyrank.fish.

set -l subcommands check grads bugs bench info
set -l models llama-demo gpt2-demo stack-demo
set -l faults column_dx_not_reduced row_bias_every_rank row_input_grad_not_gathered heads_divided_twice \
    allreduce_aliases_input init_local_fan init_per_shard_seed vocab_target_off_by_shard loss_parallel_no_max \
    embedding_edge_twice weight_grad_leading_dims bias_grad_wrong_axis norm_backward_missing
set -l none "not __fish_seen_subcommand_from $subcommands help"
set -l any "__fish_seen_subcommand_from $subcommands"
set -l check "__fish_seen_subcommand_from check"
set -l grads "__fish_seen_subcommand_from grads"
set -l bench "__fish_seen_subcommand_from bench"
set -l info "__fish_seen_subcommand_from info"
set -l layout "__fish_seen_subcommand_from check grads"

complete -c anyrank -f
complete -c anyrank -n $none -a check -d "Compare every tensor of a step with one rank's"
complete -c anyrank -n $none -a grads -d "Write outputs and gradients"
complete -c anyrank -n $none -a bugs -d "List the faults that can be injected"
complete -c anyrank -n $none -a bench -d "Time exact contractions against native ones"
complete -c anyrank -n $none -a info -d "What this machine has"
complete -c anyrank -n "__fish_seen_subcommand_from help" -a "$subcommands"
complete -c anyrank -s h -l help -d "Print help and exit"
complete -c anyrank -l version -d "Print the version and exit"

complete -c anyrank -n $any -l json -rF -d "Write the result as JSON to a file, or to -"
complete -c anyrank -n $any -s q -l quiet -d "Print nothing but errors and what --json asks for"
complete -c anyrank -n $any -l no-color -d "Print words only"
complete -c anyrank -n $any -l threads -x -d "Threads of the whole process"
complete -c anyrank -n $any -l seed -x -d "Seed of everything random"

complete -c anyrank -n $layout -a "$models (__fish_complete_directories)"
complete -c anyrank -n $layout -l tp -x -d "Tensor-parallel ranks"
complete -c anyrank -n $layout -l mlp-order -x -a "column-row row-column" -d "How the MLP's two layers are split"
complete -c anyrank -n $layout -l collectives -x -a "direct ring" -d "How the simulated cluster moves data"
complete -c anyrank -n $layout -l timeout -x -d "Longest wait of a rank, in seconds"
complete -c anyrank -n $layout -l numerics -x -a "exact native" -d "exact; native is not in this version"
complete -c anyrank -n $layout -l device -x -a "cpu cuda" -d "cpu; cuda is not in this version"

complete -c anyrank -n $check -l sweep -x -d "Every legal number of ranks up to this one"
complete -c anyrank -n $check -l batch -x -d "Sequences"
complete -c anyrank -n $check -l seq -x -d "Tokens of each"
complete -c anyrank -n $check -l text -rF -d "Any file, one byte one token"
complete -c anyrank -n $check -l steps -x -d "Training steps"
complete -c anyrank -n $check -l inject -x -a "$faults" -d "Switch a known mistake on"
complete -c anyrank -n $check -l skip-f64 -d "Do not run the binary64 baseline"

complete -c anyrank -n $grads -l input -rF -d "input_ids, attention_mask, labels"
complete -c anyrank -n $grads -l block -x -a "(__fish_complete_directories)" -d "A single block in place of a model"
complete -c anyrank -n $grads -l out -x -a "(__fish_complete_directories)" -d "Where the results go"

complete -c anyrank -n $bench -a gemm
complete -c anyrank -n $bench -l m -x -d "Rows of X"
complete -c anyrank -n $bench -l n -x -d "Rows of W"
complete -c anyrank -n $bench -l k -x -d "Columns of both"
complete -c anyrank -n $bench -l batch -x -d "Matrices of that shape"
complete -c anyrank -n $bench -l repetitions -x -d "Of which the medians are told"

complete -c anyrank -n $info -l probe -d "Measure the kernel sets of BLIS"
