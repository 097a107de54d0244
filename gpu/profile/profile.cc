/* SPDX-License-Identifier: Apache-2.0 */
/* Table of slots that wraps a device's own. It is built from the table's members, so a new slot is timed too. It is C++
 * because templates write a function for each signature. */
#include "gpu/profile/profile.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

/* What a row measures. A slot's total row has the slot's number. */
struct key {
    int slot;
    const char *part; /* NULL: the slot */
};

/* One call, timed by two stamps on a stream that has them, otherwise by the clock. */
struct span {
    key subject;
    ari_mark *begin_mark, *end_mark; /* kept for later calls */
    bool stamped;
    uint64_t began_ns, ended_ns, bytes;
};

struct ari_profile {
    ar_device_ops ops; /* must be the first field: the table that the device uses during profiling, which leads back
                          to this object */
    const ar_device_ops *inner;
    ar_device *d;
    int slot; /* slot whose call is in progress */
    ar_status failed;
    span *spans;
    size_t n, created, capacity; /* number of spans in use, with marks, and allocated */
};

namespace
{

#define ARI_SLOT_NUMBER(slot) AT_##slot,
enum slot_number { AR_DEVICE_SLOTS(ARI_SLOT_NUMBER) SLOTS };
#define ARI_SLOT_NAME(slot) #slot,
const char *const slot_names[] = {AR_DEVICE_SLOTS(ARI_SLOT_NAME)};

ari_profile *profile_of(const ar_device *d)
{
    return reinterpret_cast<ari_profile *>(const_cast<ar_device_ops *>(d->ops));
}

/* --- spans -------------------------------------------------------------------------------------------------------- */

void stamp(ari_profile *p, ar_queue *q, ari_mark **mark, uint64_t *clock_ns, bool *stamped)
{
    ari_stream *s = ari_queue_stream(q);
    *stamped = s && s->ops->stamp;
    if (*stamped) {
        const ar_status st = s->ops->stamp(s, mark);
        p->failed = p->failed == AR_OK ? st : p->failed;
    }
    *clock_ns = ari_device_clock_ns(p->d);
}

/* Returns the number of a new span, from 1; 0: memory is short, which ari_profile_read reports. */
size_t span_begin(ari_profile *p, ar_queue *q, key subject, uint64_t bytes)
{
    if (p->n == p->created) {
        const ar_status st = ari_grow(&p->spans, &p->capacity, p->created, sizeof *p->spans, "a profile's calls");
        if (st != AR_OK) {
            p->failed = st;
            return 0;
        }
        p->spans[p->created++] = {};
    }
    span *s = &p->spans[p->n++];
    s->subject = subject;
    s->bytes = bytes;
    stamp(p, q, &s->begin_mark, &s->began_ns, &s->stamped);
    return p->n;
}

void span_end(ari_profile *p, ar_queue *q, size_t number)
{
    if (number > 0)
        stamp(p, q, &p->spans[number - 1].end_mark, &p->spans[number - 1].ended_ns, &p->spans[number - 1].stamped);
}

ar_status span_seconds(const span *s, double *seconds)
{
    *seconds = 1e-9 * static_cast<double>(s->ended_ns - s->began_ns);
    if (!s->stamped)
        return AR_OK;
    AR_TRY(s->end_mark->ops->await(s->end_mark, 0));
    return s->end_mark->ops->elapsed(s->begin_mark, s->end_mark, seconds);
}

/* --- the slots ---------------------------------------------------------------------------------------------------- */

uint64_t bytes_of(const ar_tensor *t)
{
    return t && t->data.ptr ? ar_tensor_count(t) * ar_dtype_bytes(t->dtype) : 0;
}
template <class T> uint64_t bytes_of(const T &)
{
    return 0;
}

/* Wraps slot AT if it enqueues on a queue; any other slot is unchanged. */
template <class F, F ar_device_ops::*SLOT, int AT> struct timed {
    static F in_place_of(F inner)
    {
        return inner;
    }
};
template <class... A, ar_status (*ar_device_ops::*SLOT)(ar_device *, ar_queue *, A...), int AT>
struct timed<ar_status (*)(ar_device *, ar_queue *, A...), SLOT, AT> {
    static ar_status call(ar_device *d, ar_queue *q, A... a)
    {
        ari_profile *p = profile_of(d);
        const uint64_t bytes = (static_cast<uint64_t>(0) + ... + bytes_of(a));
        const size_t number = span_begin(p, q, {AT, nullptr}, bytes);
        p->slot = AT;
        const ar_status st = (p->inner->*SLOT)(d, q, a...);
        span_end(p, q, number);
        return st;
    }
    static ar_status (*in_place_of(ar_status (*inner)(ar_device *, ar_queue *, A...)))(ar_device *, ar_queue *, A...)
    {
        return AT == AT_alloc || AT == AT_packed_create ? inner : call;
    }
};

bool is_profiled(const ar_device *d)
{
    return d->ops->add == timed<decltype(ar_device_ops::add), &ar_device_ops::add, AT_add>::call;
}

/* --- the rows ----------------------------------------------------------------------------------------------------- */

bool keys_match(const key &a, const key &b)
{
    return a.slot == b.slot && (a.part == b.part || (a.part && b.part && strcmp(a.part, b.part) == 0));
}

struct sums {
    key keys[ARI_PROFILE_ROWS];
    ari_profile_row row[ARI_PROFILE_ROWS];
    size_t n;
};

/* Returns a row, or NULL if there is no space, which would need more parts than any device has. */
ari_profile_row *row_of(sums *totals, const key &k)
{
    size_t i = 0;
    while (i < totals->n && !keys_match(totals->keys[i], k))
        i++;
    if (i == ARI_PROFILE_ROWS)
        return nullptr;
    if (i == totals->n) {
        totals->keys[totals->n++] = k;
        totals->row[i] = {slot_names[k.slot], k.part, 0, 0.0, 0};
    }
    return &totals->row[i];
}

ar_status add_spans(const ari_profile *p, sums *totals)
{
    for (size_t i = 0; i < p->n; i++) {
        double seconds = 0.0;
        AR_TRY(span_seconds(&p->spans[i], &seconds));
        ari_profile_row *row = row_of(totals, p->spans[i].subject);
        if (!row)
            continue;
        row->calls++;
        row->seconds += seconds;
        row->bytes += p->spans[i].bytes;
    }
    return AR_OK;
}

double slot_seconds(const sums *totals, const char *name)
{
    for (size_t i = 0; i < totals->n; i++)
        if (totals->row[i].name == name && !totals->row[i].part)
            return totals->row[i].seconds;
    return 0.0;
}

/* Sorts by time: the longest slot first, followed by its parts, the longest first. */
bool before(const sums *totals, const ari_profile_row &a, const ari_profile_row &b)
{
    const double of_a = slot_seconds(totals, a.name), of_b = slot_seconds(totals, b.name);
    if (a.name != b.name)
        return of_a != of_b ? of_a > of_b : a.name < b.name;
    return !a.part != !b.part ? !a.part : a.seconds > b.seconds;
}

} // namespace

ar_status ari_profile_begin(ari_profile **out, ar_device *d)
{
    ari_profile *p = nullptr;
    if (is_profiled(d))
        return ar_error_set(AR_ERR_ARG, "a profile of this device is kept already");
    AR_TRY(ari_alloc_zero(reinterpret_cast<void **>(&p), 1, sizeof *p, "a profile"));
    p->ops = *d->ops;
    p->inner = d->ops;
    p->d = d;
#define ARI_TIME_SLOT(slot) \
    p->ops.slot = timed<decltype(ar_device_ops::slot), &ar_device_ops::slot, AT_##slot>::in_place_of(d->ops->slot);
    AR_DEVICE_SLOTS(ARI_TIME_SLOT)
    d->ops = &p->ops;
    *out = p;
    return AR_OK;
}

ar_status ari_profile_read(ari_profile *p, ari_profile_row *rows, size_t *n)
{
    sums totals = {};
    ar_status st = p->failed;
    if (st == AR_OK)
        st = add_spans(p, &totals);
    p->n = 0;
    p->failed = AR_OK;
    AR_TRY(st);
    for (size_t i = 0; i < totals.n; i++) { /* insertion sort, since there are few */
        size_t position = i;
        for (; position > 0 && before(&totals, totals.row[i], rows[position - 1]); position--)
            rows[position] = rows[position - 1];
        rows[position] = totals.row[i];
    }
    *n = totals.n;
    return AR_OK;
}

void ari_profile_end(ari_profile *p)
{
    if (!p)
        return;
    p->d->ops = p->inner;
    for (size_t i = 0; i < p->created; i++) {
        ari_mark_destroy(p->spans[i].begin_mark);
        ari_mark_destroy(p->spans[i].end_mark);
    }
    free(p->spans);
    free(p);
}

void *ari_profile_part(ar_device *d, ar_queue *q, const char *part)
{
    if (!is_profiled(d))
        return nullptr;
    ari_profile *p = profile_of(d);
    return reinterpret_cast<void *>(span_begin(p, q, {p->slot, part}, 0));
}

void ari_profile_part_end(ar_device *d, ar_queue *q, void *begun)
{
    if (begun)
        span_end(profile_of(d), q, reinterpret_cast<size_t>(begun));
}
