/* SPDX-License-Identifier: Apache-2.0 */
/* Handles copies of a tensor that differ from each other. Since each rank continues with its copy, the copy that is
 * furthest from the reference is compared. */
#include <math.h>

#include "ref/core/size.h"
#include "verify/compare/verify_impl.h"

/* A tensor of which copy `copy` is read instead of the first. In the arena. */
static ar_status copy_init(ar_dump_tensor *out, const ar_dump_tensor *t, int copy, ari_arena *arena)
{
    ar_dump_part *part = NULL;
    *out = *t;
    out->whole = NULL;
    AR_TRY(ARI_TAKE(&part, arena, t->parts, t->name));
    for (size_t i = 0; i < t->parts; i++) {
        ar_dump_box *box = NULL;
        AR_TRY(ARI_TAKE(&box, arena, t->part[i].boxes, t->name));
        part[i] = t->part[i];
        part[i].box = box;
        for (size_t k = 0; k < part[i].boxes; k++) {
            box[k] = t->part[i].box[k];
            const int n = box[k].replicas > 1 ? box[k].replicas : 1;
            box[k].replica = (box[k].replica + n - copy % n) % n;
        }
    }
    out->part = part;
    return AR_OK;
}

/* Computes a copy's largest difference, relative to the allowed difference if the rule is a tolerance. */
static ar_status largest_difference(double *largest, const ari_pair *p, const ar_dump_tensor *copy)
{
    const ar_dump_tensor *const sides[] = {p->side[0], copy};
    const bool tolerance = p->rule.rule == AR_VERIFY_TOLERANCE || p->rule.rule == AR_VERIFY_SENSITIVITY;
    ari_lockstep b = ari_lockstep_begin(sides, 2, 0, copy->count);
    *largest = 0.0;
    while (ari_lockstep_next(&b)) {
        const double difference = fabs(b.x[1] - b.x[0]);
        const double allowed = tolerance ? p->rule.atol + p->rule.rtol * fabs(b.x[0]) : 1.0;
        if (b.x[0] == b.x[1] || (isnan(b.x[0]) && isnan(b.x[1])))
            continue;
        *largest = isnan(difference) ? (double)INFINITY : fmax(*largest, difference / allowed);
    }
    return b.status;
}

/* A pair whose copies differ in bits, and how far each is off. */
typedef struct drifted_pair {
    ari_pair *pair;
    ar_dump_tensor *copy; /* [copies] */
    int copies, furthest;
} drifted_pair;

static ar_status find_furthest(void *user, size_t task, int worker)
{
    drifted_pair *a = (drifted_pair *)user + task;
    double max_difference = -1.0;
    (void)worker;
    for (int k = 0; k < a->copies; k++) {
        double difference;
        AR_TRY(largest_difference(&difference, a->pair, &a->copy[k]));
        a->furthest = difference > max_difference ? k : a->furthest;
        max_difference = fmax(max_difference, difference);
    }
    return AR_OK;
}

static int copies_of(const ar_dump_tensor *t)
{
    int max_copies = 1;
    for (size_t i = 0; i < t->parts; i++)
        max_copies = t->part[i].replicas > max_copies ? t->part[i].replicas : max_copies;
    return max_copies;
}

ar_status ari_verify_furthest_copies(ari_verifying *v)
{
    drifted_pair *list = NULL;
    size_t n = 0;
    AR_TRY(ARI_TAKE(&list, &v->arena, v->pairs, "pairs of tensors"));
    for (ari_pair *p = v->pair; p < v->pair + v->pairs; p++) {
        const ar_dump_tensor *t = p->side[1];
        const bool differ = p->row->drift > 0 || p->row->copies_differ;
        if (!differ || copies_of(t) == 1 || ar_dtype_bytes(t->dtype) == 0 ||
            p->format[0].parts + p->format[1].parts > 2)
            continue;
        drifted_pair *a = &list[n++];
        *a = (drifted_pair){.pair = p, .copies = copies_of(t)};
        AR_TRY(ARI_TAKE(&a->copy, &v->arena, (size_t)a->copies, t->name));
        for (int k = 0; k < a->copies; k++)
            AR_TRY(copy_init(&a->copy[k], t, k, &v->arena));
    }
    const ari_tasks tasks = {n, v->threads, find_furthest, list, NULL};
    AR_TRY(ari_tasks_run(&tasks));
    for (size_t i = 0; i < n; i++) {
        if (list[i].furthest > 0)
            list[i].pair->side[1] = &list[i].copy[list[i].furthest];
    }
    return AR_OK;
}
