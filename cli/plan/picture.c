/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of layouts as a page and as a picture: both show the JSON of `plan`, in the same colours
 * (cli/pages/plan_kinds.css). */
#include <string.h>

#include "cli/plan/plan.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "verify/run/plot.h"

/* Made by cmake/Embed.cmake. */
extern const unsigned char ari_plan_page[], ari_plan_kinds[];
extern const unsigned long ari_plan_page_bytes, ari_plan_kinds_bytes;

ar_status ari_plan_page_write(const json_t *plan, const char *path)
{
    return ari_json_save_page(plan, ari_plan_page, ari_plan_page_bytes, path);
}

/* --- the picture -------------------------------------------------------------------------------------------------- */

/* Pixels. A row has a name, a bar of memory and one of time, each with its sum right of where the longest ends. */
enum {
    WIDTH = 1120,
    LEFT = 20,
    MEMORY_AT = 560,
    TIME_AT = 850,
    LENGTH = 190,
    TOP = 92,
    ROW = 26,
    BAR = 16,
    SUM_GAP = 6
};
enum { MOST_ROWS = 32, MOST_KINDS = 16 };

/* One of the two columns of bars. */
typedef struct measure {
    const char *name;             /* of the JSON's member, and of the classes */
    double at, most;              /* pixels; what the longest bar is */
    const char *kind[MOST_KINDS]; /* in the order of the JSON */
    bool has[MOST_KINDS];         /* whether some layout has any of it */
    size_t kinds;
} measure;

typedef struct picture {
    const json_t *plan;
    const json_t *row[MOST_ROWS];
    size_t rows;
    double room; /* bytes of a GPU; 0: no limit */
    measure memory, time;
} picture;

static double number_of(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static const json_t *parts_of(const json_t *layout, const measure *m)
{
    return json_object_get(json_object_get(layout, m->name), ari_cost_model_names[ARI_COST_PRODUCTION]);
}

/* Members of the JSON besides kinds are the sum of these, and what is no part of it. */
static bool is_kind(const char *key, const json_t *value)
{
    return json_is_number(value) && strcmp(key, "sum") != 0 && strcmp(key, "hidden") != 0;
}

/* The index of a kind in the list of all; MOST_KINDS if there is no room for another. */
static size_t kind_of(measure *m, const char *kind)
{
    size_t i = 0;
    while (i < m->kinds && strcmp(m->kind[i], kind) != 0)
        i++;
    if (i == m->kinds && i < MOST_KINDS)
        m->kind[m->kinds++] = kind;
    return i;
}

static void look_at(measure *m, const json_t *layout)
{
    const char *key;
    json_t *value, *parts = (json_t *)(uintptr_t)parts_of(layout, m);
    const double sum = number_of(parts, "sum");
    m->most = sum > m->most ? sum : m->most;
    json_object_foreach(parts, key, value)
    {
        const size_t kind = is_kind(key, value) ? kind_of(m, key) : MOST_KINDS;
        if (kind < MOST_KINDS && json_number_value(value) > 0.0)
            m->has[kind] = true;
    }
}

static void class_of(char *text, size_t size, const measure *m, const char *kind)
{
    snprintf(text, size, "%s-%s", m->name, kind);
    for (char *c = text; *c; c++)
        *c = *c == ' ' ? '-' : *c;
}

static void put_bar(FILE *to, const measure *m, const json_t *layout, double y)
{
    double x = m->at;
    for (size_t i = 0; i < m->kinds; i++) {
        const double length = number_of(parts_of(layout, m), m->kind[i]) / m->most * LENGTH;
        char class[64];
        class_of(class, sizeof class, m, m->kind[i]);
        if (length > 0.0)
            fprintf(to, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\"/>\n", class, x, y,
                    length, BAR);
        x += length;
    }
}

static void put_row(FILE *to, const picture *p, size_t i)
{
    const json_t *layout = p->row[i];
    const double y = TOP + (double)i * ROW, text_y = y + BAR - 4;
    ari_plot_label(to, LEFT, text_y, "", json_string_value(json_object_get(layout, "name")));
    put_bar(to, &p->memory, layout, y);
    ari_plot_label(to, p->memory.at + LENGTH + SUM_GAP, text_y, "class=\"quiet\"",
                   ARI_BYTES((uint64_t)number_of(layout, "bytes")));
    put_bar(to, &p->time, layout, y);
    ari_plot_label(to, p->time.at + LENGTH + SUM_GAP, text_y, "class=\"quiet\"",
                   ARI_SECONDS(number_of(layout, "seconds")));
}

/* The kinds of a measure, in as many lines as they need; returns where the next legend begins. NULL only measures. */
static double put_legend(FILE *to, const measure *m, double y)
{
    double x = LEFT;
    for (size_t i = 0; i < m->kinds; i++) {
        const double needs = 7.0 * (double)strlen(m->kind[i]) + 34.0;
        char class[64];
        if (!m->has[i])
            continue;
        if (x + needs > WIDTH - 10) {
            x = LEFT;
            y += 20;
        }
        class_of(class, sizeof class, m, m->kind[i]);
        if (to) {
            fprintf(to, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"12\" height=\"12\"/>\n", class, x, y - 10);
            ari_plot_label(to, x + 17, y, "class=\"quiet\"", m->kind[i]);
        }
        x += needs;
    }
    return y + 24;
}

static void put_heads(FILE *to, const picture *p)
{
    char memory[64] = "memory of a GPU";
    if (p->room > 0.0)
        snprintf(memory, sizeof memory, "memory of a GPU, which has %.4g GB", p->room * 1e-9);
    ari_plot_label(to, p->memory.at, TOP - 14, "class=\"quiet\"", memory);
    ari_plot_label(to, p->time.at, TOP - 14, "class=\"quiet\"", "time of a step");
    if (p->room > 0.0 && p->room <= p->memory.most)
        fprintf(to, "<path class=\"limit\" d=\"M%.1f %dV%zu\"/>\n", p->memory.at + p->room / p->memory.most * LENGTH,
                TOP - 6, TOP + p->rows * ROW - 4);
}

static ar_status draw(FILE *to, const void *what)
{
    const picture *p = what;
    const json_t *cluster = json_object_get(p->plan, "cluster");
    const double gpus = number_of(p->plan, "gpus");
    char title[256], subtitle[400];
    const double legend = TOP + (double)p->rows * ROW + 18;
    snprintf(title, sizeof title, "%s on %.0f GPU%s", json_string_value(json_object_get(p->plan, "model")), gpus,
             gpus > 1.0 ? "s" : "");
    snprintf(subtitle, sizeof subtitle, "a step of %.0f x %.0f tokens; %s", number_of(p->plan, "batch"),
             number_of(p->plan, "seq"), json_string_value(json_object_get(cluster, "words")));
    const double end = put_legend(NULL, &p->time, put_legend(NULL, &p->memory, legend));
    ari_plot_begin(to, WIDTH, (int)end, LEFT, title, subtitle, (const char *)ari_plan_kinds);
    put_heads(to, p);
    for (size_t i = 0; i < p->rows; i++)
        put_row(to, p, i);
    put_legend(to, &p->time, put_legend(to, &p->memory, legend));
    fputs("</svg>\n", to);
    return AR_OK;
}

ar_status ari_plan_picture_write(const json_t *plan, const char *path)
{
    picture p = {.plan = plan,
                 .room = number_of(json_object_get(plan, "cluster"), "memory_bytes"),
                 .memory = {.name = "memory", .at = MEMORY_AT},
                 .time = {.name = "time", .at = TIME_AT}};
    size_t i;
    json_t *layout;
    json_array_foreach(json_object_get(plan, "layouts"), i, layout)
    {
        if (!parts_of(layout, &p.memory) || p.rows == MOST_ROWS)
            continue;
        p.row[p.rows++] = layout;
        look_at(&p.memory, layout);
        look_at(&p.time, layout);
    }
    if (p.rows == 0)
        return ar_error_set(AR_ERR_ARG, "%s: none of the layouts that are listed is legal, so there is nothing to draw",
                            ARI_SHOW(path));
    if (p.room > p.memory.most && p.room <= 2.0 * p.memory.most) /* near enough to be in the picture */
        p.memory.most = p.room;
    return ari_plot_save(path, draw, &p);
}
