# SPDX-License-Identifier: Apache-2.0
# Completion of anyrank for fish. Installed as share/fish/vendor_completions.d/anyrank.fish.

set -l subcommands check grads train verify reshard bugs bench info
set -l models llama-demo gpt2-demo stack-demo
set -l faults column_dx_not_reduced row_bias_every_rank row_input_grad_not_gathered heads_divided_twice \
    allreduce_aliases_input init_local_fan init_per_shard_seed vocab_target_off_by_shard loss_parallel_no_max \
    embedding_edge_twice weight_grad_leading_dims bias_grad_wrong_axis norm_backward_missing sp_norm_grad_local \
    sp_row_bias_grad_local sp_position_grad_local kv_replica_grad_local kv_replica_wrong_head \
    dropout_same_mask_in_shard dropout_different_mask_in_replica dp_mean_of_means dp_sum_of_local_means \
    dp_group_missing dp_broadcast_over_world accum_mean_of_means saved_input_overwritten embedding_tied_once \
    gradnorm_counts_replicas gradnorm_local_clip group_wrong_stride world_rank_in_group positions_local \
    silent_truncation gate_up_interleaved_wrong norm_padded_lanes bias_added_twice row_bias_partial_grad \
    init_replica_differs gather_batch_order collective_order_swapped collective_size_mismatch \
    collective_dtype_mismatch bucket_first_ready bucket_reduced_twice bucket_not_packed bucket_stale_done \
    step_before_copy_back comm_before_producer stale_activation_reuse unused_skips_collective unused_set_empty \
    unused_in_last_micro_batch tied_reduced_at_first_use accum_last_only accum_sum_of_means mean_divides_by_world \
    dp_init_differs zero_gather_missing zero_shards_misaligned zero_grad_not_recursive gradnorm_first_rank_only \
    adam_step_not_synced optimizer_counter_ahead weight_decay_on_shard_only norm_fp16_store
set -l none "not __fish_seen_subcommand_from $subcommands help"
set -l any "__fish_seen_subcommand_from $subcommands"
set -l check "__fish_seen_subcommand_from check"
set -l grads "__fish_seen_subcommand_from grads"
set -l train "__fish_seen_subcommand_from train"
set -l verify "__fish_seen_subcommand_from verify"
set -l reshard "__fish_seen_subcommand_from reshard"
set -l bench "__fish_seen_subcommand_from bench"
set -l info "__fish_seen_subcommand_from info"
set -l bugs "__fish_seen_subcommand_from bugs"
set -l layout "__fish_seen_subcommand_from check grads train bench"
set -l watch "__fish_seen_subcommand_from check grads train"
set -l split "__fish_seen_subcommand_from check grads train bench"
set -l ddp "__fish_seen_subcommand_from check grads train"
set -l optimizer "__fish_seen_subcommand_from check train"

complete -c anyrank -f
complete -c anyrank -n $none -a check -d "Compare every tensor of training steps with one rank's"
complete -c anyrank -n $none -a grads -d "Write outputs and gradients"
complete -c anyrank -n $none -a train -d "Train on text, the same bits on every layout"
complete -c anyrank -n $none -a verify -d "Compare two dumps of tensors"
complete -c anyrank -n $none -a reshard -d "Split and merge checkpoints"
complete -c anyrank -n $none -a bugs -d "List the faults that can be injected, and run each"
complete -c anyrank -n $none -a bench -d "Time what anyrank does against what bounds it"
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
complete -c anyrank -n $layout -l numerics -x -a "exact native" -d "The same bits, or within an allowance"
complete -c anyrank -n $layout -l device -x -a "cpu cuda cuda:0 emulated" -d "What the ranks compute on"

complete -c anyrank -n $optimizer -l transport -x -a "sim mpi nccl" -d "What ranks are"
complete -c anyrank -n $optimizer -l share-gpus -d "Several processes may use one GPU"

complete -c anyrank -n $watch -l trace -rF -d "Record the run for Perfetto"
complete -c anyrank -n $watch -l timeline -rF -d "Record the run as a page"
complete -c anyrank -n $watch -l cluster -x -d "Tell what it would take on that cluster"

complete -c anyrank -n $split -l sp -d "Sequence parallel beside --tp"
complete -c anyrank -n $split -l keep-gathered -d "Keep gathered inputs for the backward pass"
complete -c anyrank -n $split -l dp -x -d "Data-parallel ranks"
complete -c anyrank -n $split -l micro-batches -x -d "Pieces in which a rank goes through its sequences"
complete -c anyrank -n $split -l forward-first -d "All micro-batches go forward before the first goes backward"

complete -c anyrank -n $ddp -l zero -x -d "1: share the optimizer's state out to the data-parallel ranks"
complete -c anyrank -n $ddp -l bucket-bytes -x -d "Capacity of a bucket of gradients"
complete -c anyrank -n $ddp -l bucket-mode -x -a "overlap eager" -d "When buckets are reduced"
complete -c anyrank -n $ddp -l find-unused -d "Agree which parameters got a gradient"

complete -c anyrank -n $optimizer -l optimizer -x -a "sgd adam adamw" -d "What updates the weights"
complete -c anyrank -n $optimizer -l lr -x -d "Learning rate"
complete -c anyrank -n $optimizer -l lr-schedule -x -a "constant cosine" -d "How the learning rate goes on after the warm-up"
complete -c anyrank -n $optimizer -l warmup -x -d "Steps in which the learning rate rises"
complete -c anyrank -n $optimizer -l min-lr -x -d "Learning rate at the end of a cosine"
complete -c anyrank -n $optimizer -l momentum -x -d "Of sgd"
complete -c anyrank -n $optimizer -l nesterov -d "Of sgd, with momentum"
complete -c anyrank -n $optimizer -l betas -x -d "Of adam and adamw"
complete -c anyrank -n $optimizer -l weight-decay -x -d "Of the weights"
complete -c anyrank -n $optimizer -l decay -x -a "all matrices" -d "Which parameters decay"
complete -c anyrank -n $optimizer -l group -x -d "Learning rate and decay of the parameters that match"

complete -c anyrank -n $check -l sweep -d "Every legal layout of up to so many ranks"
complete -c anyrank -n $check -l batch -x -d "Sequences"
complete -c anyrank -n $check -l seq -x -d "Tokens of each"
complete -c anyrank -n $check -l text -rF -d "Any file, one byte one token"
complete -c anyrank -n $check -l steps -x -d "Training steps"
complete -c anyrank -n $check -l clip -x -d "Largest norm of all gradients together"
complete -c anyrank -n $check -l dropout -x -d "Probability"
complete -c anyrank -n $check -l precision -x -a "f32 tf32 bf16" -d "Of native products"
complete -c anyrank -n $check -l inject -x -a "$faults" -d "Switch a known mistake on"
complete -c anyrank -n $check -l gradcheck -d "Compare with central differences"
complete -c anyrank -n $check -l skip-f64 -d "Do not run the binary64 baseline"
complete -c anyrank -n $check -l memory -d "Print the memory of a rank too"
complete -c anyrank -n $check -l list-tensors -d "Print the tensors that are compared"
complete -c anyrank -n $check -l dump -x -a "(__fish_complete_directories)" -d "Write the tensors of baseline and ranks"
complete -c anyrank -n $check -l schedule -x -d "Let a seed decide which rank goes on"
complete -c anyrank -n $check -l net-fault -x -d "Let the transport do wrong once"
complete -c anyrank -n $check -l verify-transfers -d "Compare a checksum of every transfer"

complete -c anyrank -n $bugs -l run -d "Run each in a case in which it matters"
complete -c anyrank -n $bugs -l numerics -x -a "exact native" -d "Equal bits, or how far outside of rounding"
complete -c anyrank -n $bugs -l precision -x -a "f32 tf32 bf16" -d "Of native products"
complete -c anyrank -n $bugs -l curves -d "What losses and a tolerance would show of it"

complete -c anyrank -n $grads -l inject -x -a "$faults" -d "Switch a known mistake on"
complete -c anyrank -n $grads -l input -rF -d "input_ids, attention_mask, labels"
complete -c anyrank -n $grads -l block -x -a "(__fish_complete_directories)" -d "A single block in place of a model"
complete -c anyrank -n $grads -l out -x -a "(__fish_complete_directories)" -d "Where the results go"
complete -c anyrank -n $grads -l precision -x -a "f32 tf32 bf16" -d "Of native products"
complete -c anyrank -n $grads -l sensitivity -d "Write what rounding may change too"
complete -c anyrank -n $grads -l sensitivity-of -x -a "f32 tf32 bf16 bf16-pure f16 f16-pure" -d "In which arithmetic"
complete -c anyrank -n $grads -l per-rank -d "Write what each rank holds too"
complete -c anyrank -n $grads -l activations -d "Write every tensor of the two passes too"

complete -c anyrank -n $train -l data -rF -d "What to train on"
complete -c anyrank -n $train -l data-format -x -a "auto bytes u16 u32 safetensors" -d "Of the data"
complete -c anyrank -n $train -l in-order -d "Do not shuffle the windows of the data"
complete -c anyrank -n $train -l steps -x -d "Training steps since the start of the run"
complete -c anyrank -n $train -l batch -x -d "Sequences of a step"
complete -c anyrank -n $train -l seq -x -d "Tokens of each"
complete -c anyrank -n $train -l clip -x -d "Largest norm of all gradients together"
complete -c anyrank -n $train -l dropout -x -d "Probability"
complete -c anyrank -n $train -l storage -x -a "f32 bf16" -d "Of the matrices"
complete -c anyrank -n $train -l loss-scale -x -d "What the loss is multiplied by"
complete -c anyrank -n $train -l save -x -a "(__fish_complete_directories)" -d "Where checkpoints go"
complete -c anyrank -n $train -l save-every -x -d "A checkpoint every so many steps"
complete -c anyrank -n $train -l keep -x -d "How many checkpoints stay"
complete -c anyrank -n $train -l resume -x -a "(__fish_complete_directories)" -d "Go on with a checkpoint"
complete -c anyrank -n $train -l stop-after -x -d "End after this step"
complete -c anyrank -n $train -l verify-every -x -d "Steps between verified gradients"
complete -c anyrank -n $train -l plot -rF -d "Draw the loss"
complete -c anyrank -n $train -l log-every -x -d "Steps from line to line"
complete -c anyrank -n $train -l inject -x -a "$faults" -d "Switch a known mistake on"

complete -c anyrank -n $verify -F
complete -c anyrank -n $verify -l bits -d "The same is what has the same bits"
complete -c anyrank -n $verify -l ulp -x -d "Steps of the dtype that are allowed"
complete -c anyrank -n $verify -l rtol -x -d "Relative tolerance"
complete -c anyrank -n $verify -l atol -x -d "Absolute tolerance"
complete -c anyrank -n $verify -l sensitivity -rF -d "What each tensor is allowed"
complete -c anyrank -n $verify -l map -rF -d "How the files of OTHER make full tensors"
complete -c anyrank -n $verify -l reference-map -rF -d "How the files of REFERENCE make full tensors"
complete -c anyrank -n $verify -l only -x -d "Only tensors of these names"
complete -c anyrank -n $verify -l ignore -x -d "No tensors of these names"
complete -c anyrank -n $verify -l common -d "Compare what both dumps have"
complete -c anyrank -n $verify -l no-equal-nan -d "NaN against NaN is a difference"
complete -c anyrank -n $verify -l html -rF -d "Write the report as a page"
complete -c anyrank -n $verify -l max-report -x -d "Rows of a table at most"
complete -c anyrank -n $verify -l tp -x -d "Tensor-parallel ranks, for the hints"
complete -c anyrank -n $verify -l dp -x -d "Data-parallel ranks, for the hints"
complete -c anyrank -n $verify -l heads -x -d "Attention heads, for the hints"
complete -c anyrank -n $verify -l kv-heads -x -d "Key/value heads, for the hints"

complete -c anyrank -n $reshard -F
complete -c anyrank -n $reshard -l out -x -a "(__fish_complete_directories)" -d "Where it goes"
complete -c anyrank -n $reshard -l tp -x -d "Tensor-parallel ranks"
complete -c anyrank -n $reshard -l pp -x -d "Pipeline stages"
complete -c anyrank -n $reshard -l dp -x -d "Data-parallel ranks"
complete -c anyrank -n $reshard -l dp-copies -d "A file for every data-parallel rank"
complete -c anyrank -n $reshard -l embedding-hidden -d "Split the embedding along the hidden dimension"
complete -c anyrank -n $reshard -l pad-vocab -x -d "Pad the vocabulary to a multiple"
complete -c anyrank -n $reshard -l shard-size -x -d "The most tensors of one merged file"
complete -c anyrank -n $reshard -l map -rF -d "How the files of IN fit together"
complete -c anyrank -n $reshard -l config -rF -d "config.json, or a folder with one"
complete -c anyrank -n $reshard -l strict -d "Refuse what is otherwise noted"
complete -c anyrank -n $reshard -l dry-run -d "Say what would be written"

complete -c anyrank -n $bench -a "gemm grad block step ddp allreduce"
complete -c anyrank -n $bench -l m -x -d "Rows of X"
complete -c anyrank -n $bench -l n -x -d "Rows of W"
complete -c anyrank -n $bench -l k -x -d "Columns of both"
complete -c anyrank -n $bench -l batch -x -d "Matrices, or sequences"
complete -c anyrank -n $bench -l seq -x -d "Tokens of a sequence"
complete -c anyrank -n $bench -l repetitions -x -d "Of which the medians are told"
complete -c anyrank -n $bench -l ranks -x -d "Simulated ranks of the all-reduce"
complete -c anyrank -n $bench -l bytes -x -d "Bytes of each rank"
complete -c anyrank -n $bench -l precision -x -a "f32 tf32 bf16" -d "Of native products"
complete -c anyrank -n $bench -l dtype -x -a "f32 i64" -d "What is summed"
complete -c anyrank -n $bench -l algorithm -x -a "auto direct ring last" -d "How data moves"

complete -c anyrank -n $info -l probe -d "Measure the kernel sets of BLIS"
