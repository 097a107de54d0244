# SPDX-License-Identifier: Apache-2.0
"""Waits, marks and synchronisations that are left out, one at a time: each is to be seen under late streams.

    scripts/mutate.py --table tests/gpu/stream_mutants.py --likely-only

What has no row is not needed for the bits of any run: where a stream or a queue ends (ar_queue_destroy, ar_ddp_destroy,
ar_ctx_end_step's and the pipeline's drains), what was enqueued there has been waited for unless the run has failed, and
the failure is what is reported; nor is a wait of a queue for its own past, which ari_queue_follow leaves out.
"""

TESTS = "gpu/late_main"
HOST = "gpu/late_streams_test"

# What is wrong, the file, what stands there, what stands there instead.
MUTANTS = [
    # --- events and queues
    ("an event does not mark the stream", "ref/core/queue.c",
     "return ari_queue_note(q, s->ops->mark(s, &e->end->mark));",
     "return e->end->mark ? AR_OK : ari_queue_note(q, s->ops->mark(s, &e->end->mark));"),
    ("a stream does not wait for a mark", "ref/core/queue.c", "st = w->stream->ops->wait(w->stream, m);",
     "st = AR_OK;"),
    ("a task ends before its stream does", "ref/core/queue.c",
     "        (void)ari_queue_note(q, ari_stream_sync(q->stream, 0));\n        (void)ari_queue_note(q, first_error",
     "        (void)ari_queue_note(q, first_error"),
    ("a queue follows another without waiting", "ref/context/context.c", "    return ar_queue_wait(q, e);\n}",
     "    return AR_OK;\n}"),
    ("the host does not wait for a stream", "ref/core/stream.c", "const ar_status st = s->ops->await(end, timeout_ns);",
     "const ar_status st = (ar_status)(0 * timeout_ns);"),
    ("a queue is waited for and its stream is not", "ref/core/queue.c",
     "    if (q->stream && q->kind == AR_QUEUE_INLINE)\n        AR_TRY(ari_queue_note(q, "
     "ari_stream_sync(q->stream, timeout_ns)));\n", "", HOST),
    ("the host's own task does not wait for the stream", "ref/core/queue.c",
     "        AR_TRY(ari_queue_await(q, ari_queue_ticket(q), 0));", "        q->stop = false;", HOST),
    ("an event is waited for and its stream is not", "ref/core/queue.c", "    AR_TRY(await_stream(e, timeout_ns));\n",
     "    (void)await_stream;\n", HOST),
    ("a queue of the host does not wait for a stream", "ref/core/queue.c", "        st = await_stream(&w->point, 0);",
     "        st = AR_OK;", HOST),
    ("an event is done before its stream is", "ref/core/queue.c",
     "return *is_done && m ? ari_queue_note(e->q, m->ops->poll(m, is_done)) : AR_OK;", "return m ? AR_OK : AR_OK;",
     HOST),
    # --- contractions whose sums are reduced beside
    ("a scattered sum is reduced before it is made", "ref/arith/exact.c",
     "AR_TRY(ari_queue_follow(q, ctx->queue, reduced));", "(void)reduced;"),
    ("a scattered sum is not recorded", "ref/arith/exact.c", "        return ar_event_record(reduced, q);",
     "        return AR_OK;"),
    ("a scattered sum is not waited for", "ref/arith/exact.c",
     "        AR_TRY(ar_queue_wait(ctx->queue, s->reduced));\n", ""),
    ("a scattered native sum is reduced before it is made", "ref/arith/native.c",
     "    AR_TRY(ari_queue_follow(q, ctx->queue, s->reduced));\n", ""),
    ("a scattered native sum is not recorded", "ref/arith/native.c", "        return ar_event_record(s->reduced, q);",
     "        return AR_OK;"),
    ("a scattered native sum is not waited for", "ref/arith/native.c",
     "        AR_TRY(ar_queue_wait(ctx->queue, s->reduced));\n", ""),
    # --- gathers in chunks
    ("a chunk is gathered before it is there", "ref/layers/linear/chunks.c",
     "    AR_TRY(ari_queue_follow(q, ctx->queue, g->arrival_event[i % 2]));\n", ""),
    ("a gathered chunk is not recorded", "ref/layers/linear/chunks.c",
     "return ar_event_record(g->arrival_event[i % 2], q);", "return AR_OK;"),
    ("a gathered chunk is not waited for", "ref/layers/linear/chunks.c",
     "    AR_TRY(ar_queue_wait(ctx->queue, g->arrival_event[i % 2]));\n", ""),
    # --- gradients
    ("a bucket is reduced before its gradients are made", "ref/train/ddp.c",
     "    AR_TRY(ar_queue_wait(d->communication->queue, b->produced));\n", ""),
    ("a bucket's gradients are not recorded", "ref/train/ddp.c",
     "    AR_TRY(ar_event_record(b->produced, ctx->queue));\n", ""),
    ("a step does not wait for its reductions", "ref/train/ddp.c",
     "    if (d->communication)\n        AR_TRY(ar_queue_sync(d->communication->queue, 0));\n    ari_ddp_complete",
     "    ari_ddp_complete"),
    ("a unit is reduced before its gradients are made", "ref/train/weights.c",
     "    AR_TRY(ar_queue_wait(d->communication->queue, u->produced));\n", ""),
    ("a unit's gradients are not recorded", "ref/train/weights.c",
     "    AR_TRY(ar_event_record(u->produced, d->ctx->queue));\n", ""),
    ("a unit's room is freed before it is reduced", "ref/train/weights.c",
     "d->communication ? ar_queue_wait(d->ctx->queue, u->reduced) : AR_OK;", "AR_OK;"),
    ("a unit's reduction is not recorded", "ref/train/weights.c",
     "return ar_event_record(u->reduced, d->communication->queue);", "return AR_OK;"),
    # --- weights
    ("weights are gathered before they are there", "ref/train/weights.c",
     "    AR_TRY(ar_queue_wait(d->gathers->queue, u->shared));\n", ""),
    ("shares of weights are not recorded", "ref/train/weights.c",
     "    AR_TRY(ar_event_record(u->shared, ctx->queue));\n", ""),
    ("gathered weights are not recorded", "ref/train/weights.c",
     "return ar_event_record(u->gathered, d->gathers->queue);", "return AR_OK;"),
    ("gathered weights are not waited for", "ref/train/weights.c",
     "return ari_span_end(ar_queue_wait(ctx->queue, u->gathered));",
     "return ari_span_end(ctx ? AR_OK : AR_ERR_INTERNAL);"),
    # --- pipelines
    ("a receiver does not wait for its memory", "ref/train/pipeline.c",
     "    AR_TRY(ari_queue_follow(sender->queue, ctx->queue, f->ready));\n", ""),
    ("what is received is not recorded", "ref/train/pipeline.c", "return ar_event_record(f->ready, sender->queue);",
     "return AR_OK;"),
    ("what is received is not waited for", "ref/train/pipeline.c",
     "    AR_TRY(ar_queue_wait(p->ctx->queue, f->ready));\n", "    (void)p;\n"),
    ("what is sent is not waited for before it is freed", "ref/train/pipeline.c",
     "AR_TRY(wait ? ar_queue_wait(p->ctx->queue, s->sent) : ar_event_test(s->sent, &received));", "(void)wait;"),
    ("what is sent is not waited for", "ref/train/pipeline.c",
     "    AR_TRY(ari_queue_follow(receiver->queue, p->ctx->queue, s->sent));\n", ""),
    ("what is sent is not recorded", "ref/train/pipeline.c", "return ar_event_record(s->sent, receiver->queue);",
     "return AR_OK;"),
    # --- the emulated device
    ("a copy returns before the host's memory is done with", "gpu/emulated/runtime.cc",
     "return host ? ari_stream_sync(ari_queue_stream(q), 0) : AR_OK;", "(void)host;\n    return AR_OK;"),
    ("memory of another stream is taken without a wait", "gpu/emulated/stream.cc",
     "        AR_TRY(append_wait(s, static_cast<const task *>(c->freed_by)->completion));", "        (void)owner;"),
    ("memory is given back before its stream comes to it", "gpu/emulated/stream.cc",
     "    append(cast_stream(base), t);\n    chunk *c",
     "    t->next = cast_stream(base)->head;\n    cast_stream(base)->head = t;\n    cast_stream(base)->tail = "
     "t->next ? cast_stream(base)->tail : &t->next;\n    chunk *c"),
]
