/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions: what of a file becomes which rotation, and what is refused. */
#include "io/config_text.h"
#include "ref/io/config_private.h"

/* Heads of 8 features. */
#define LLAMA                                                                                                \
    "{'model_type':'llama','vocab_size':256,'hidden_size':64,'intermediate_size':176,'num_hidden_layers':4," \
    "'num_attention_heads':8,'num_key_value_heads':2,'max_position_embeddings':96}"
/* Heads of 16. */
#define PHI3                                                                          \
    "{'model_type':'phi3','vocab_size':256,'hidden_size':64,'intermediate_size':176," \
    "'num_hidden_layers':4,'num_attention_heads':4}"
#define SCALED(type, more) "'rope_theta':1e5,'rope_scaling':{'rope_type':'" type "'" more "}"
#define FACTORS ",'short_factor':[1,1.5,2,2.5],'long_factor':[3,4,5.5,6]"

static ar_config known(const char *base, const char *more)
{
    const ar_config c = config_read(base, more);
    cr_expect_eq(c.unknown_keys, 0, "%s: %s", more, c.unknown[0]);
    return c;
}

CLAIM(yarn_has_the_defaults_of_hugging_face)
{
    ar_rope r = known(LLAMA, SCALED("yarn", ",'factor':4")).rope;
    cr_expect(r.kind == AR_ROPE_YARN && r.factor == 4 && r.beta_fast == 32 && r.beta_slow == 1 && r.truncate);
    cr_expect(r.original_positions == 96 && r.attention_factor == 0 && r.mscale == 0 && r.mscale_all_dim == 0);
    r = known(LLAMA, SCALED("yarn", ",'factor':null,'original_max_position_embeddings':32,'truncate':null")).rope;
    cr_expect(r.factor == 3 && r.original_positions == 32 && !r.truncate);
    r = known(LLAMA, SCALED("yarn", ",'factor':4,'beta_fast':8,'beta_slow':0.5,'mscale':1.5,'mscale_all_dim':0.5,"
                                    "'truncate':false,'attention_factor':1.25"))
            .rope;
    cr_expect_eq(known(LLAMA, SCALED("yarn", ",'factor':4,'beta_fast':2,'beta_slow':2")).rope.beta_slow, 2);
    cr_expect(r.beta_fast == 8 && r.beta_slow == 0.5 && r.mscale == 1.5 && r.mscale_all_dim == 0.5 && !r.truncate);
    cr_expect_eq(r.attention_factor, 1.25);
}

CLAIM(what_makes_no_sense_is_refused)
{
    static const refused_config cases[] = {
        {LLAMA, SCALED("dynamic", ""), "'factor' is missing"},
        {LLAMA, SCALED("dynamic", ",'factor':0.5"), "'factor' is 0.5"},
        {LLAMA, SCALED("dynamic", ",'factor':-2"), "'factor' is -2"},
        {LLAMA, SCALED("dynamic", ",'factor':2") ",'head_dim':2", "expected more than 2"},
        {LLAMA, SCALED("yarn", ""), "'factor' is missing"},
        {LLAMA, SCALED("yarn", ",'factor':-4"), "'factor' is -4"},
        {LLAMA, SCALED("yarn", ",'factor':null,'original_max_position_embeddings':97"), "'factor'"},
        {LLAMA, SCALED("yarn", ",'factor':4,'beta_fast':0"), "'beta_fast' is 0"},
        {LLAMA, SCALED("yarn", ",'factor':4,'beta_slow':-1"), "'beta_slow' is -1"},
        {LLAMA, SCALED("yarn", ",'factor':4,'beta_slow':33"), "'beta_fast' is 32, expected at least beta_slow, 33"},
        {LLAMA, SCALED("yarn", ",'factor':4,'truncate':1"), "'truncate'"},
        {LLAMA, SCALED("yarn", ",'factor':4,'mscale':-1"), "'mscale' is -1"},
        {LLAMA, SCALED("yarn", ",'factor':4,'attention_factor':0"), "'attention_factor' is 0"},
        {LLAMA, SCALED("yarn", ",'factor':4,'attention_factor':'1'"), "'attention_factor'"},
        {LLAMA, SCALED("yarn", ",'factor':4,'original_max_position_embeddings':0"),
         "'original_max_position_embeddings'"},
        {LLAMA, "'rope_parameters':{'rope_type':'yarn','factor':4,'rope_theta':1}", "'rope_theta' is 1"},
        {LLAMA, SCALED("longrope", ""), "'short_factor' is missing"},
        {LLAMA, SCALED("longrope", ",'short_factor':[1,1,1,1]"), "'long_factor' is missing"},
        {LLAMA, SCALED("longrope", ",'short_factor':[1,1,1],'long_factor':[1,1,1,1]"),
         "'short_factor' has 3 entries, expected one for each of 4 pairs"},
        {LLAMA, SCALED("longrope", ",'short_factor':[1,1,1,1],'long_factor':[1,1,1,1,1]"),
         "'long_factor' has 5 entries"},
        {LLAMA, SCALED("longrope", ",'short_factor':[1,1,-1,1],'long_factor':[1,1,1,1]"),
         "'short_factor': entry 2 is -1"},
        {LLAMA, SCALED("longrope", ",'short_factor':[1,1,1,1],'long_factor':[1,0,1,1]"), "'long_factor': entry 1 is 0"},
        {LLAMA, SCALED("longrope", ",'short_factor':[1,1,1,1],'long_factor':[1,1e60,1,1]"),
         "'long_factor': entry 1 is inf"},
        {LLAMA, SCALED("longrope", ",'short_factor':[1,'1',1,1],'long_factor':[1,1,1,1]"), "entry 1 is not a number"},
        {LLAMA, SCALED("longrope", ",'short_factor':1,'long_factor':[1,1,1,1]"), "'short_factor'"},
        {LLAMA, SCALED("longrope", FACTORS ",'factor':0"), "'factor' is 0"},
        {LLAMA, SCALED("longrope", FACTORS ",'attention_factor':-1"), "'attention_factor' is -1"},
        {LLAMA, SCALED("longrope", FACTORS ",'original_max_position_embeddings':1"),
         "'original_max_position_embeddings' is 1"},
        {LLAMA, SCALED("longrope", FACTORS) ",'head_dim':258", "129 pairs"},
        {LLAMA, SCALED("su", FACTORS), "'rope_type' is 'su'"},
        {LLAMA, "'partial_rotary_factor':0.5", "'partial_rotary_factor'"},
        {LLAMA, SCALED("linear", ",'factor':2,'partial_rotary_factor':0.5"), "'partial_rotary_factor' is 0.5"},
        {PHI3, "'partial_rotary_factor':0", "'partial_rotary_factor' is 0"},
        {PHI3, "'partial_rotary_factor':-0.5", "'partial_rotary_factor' is -0.5"},
        {PHI3, "'partial_rotary_factor':1.5", "'partial_rotary_factor' is 1.5"},
        {PHI3, "'partial_rotary_factor':0.2", "an even number of features"},
        {PHI3, "'partial_rotary_factor':'1'", "'partial_rotary_factor'"},
        {PHI3, SCALED("linear", ",'factor':2"), "supported are 'default' and 'longrope'"},
        {PHI3, SCALED("longrope", FACTORS), "'short_factor' has 4 entries, expected one for each of 8 pairs"},
        {PHI3, "'partial_rotary_factor':0.5," SCALED("longrope", FACTORS ",'original_max_position_embeddings':32"),
         "'original_max_position_embeddings' is 32, but 4096 beside it"},
        {PHI3, "'attention_bias':true", "'attention_bias' is true"},
        {PHI3, "'mlp_bias':true", "'mlp_bias' is true"},
        {PHI3, "'sliding_window':0", "'sliding_window' is 0"},
        {PHI3, "'resid_pdrop':2", "'resid_pdrop' is 2"},
    };
    configs_refused(cases, sizeof cases / sizeof *cases);
    cr_expect_eq(known(PHI3, "'resid_pdrop':0.1").config_dropout, 0.1);
}

/* A layer with a window has the second rotation where there is one. */
CLAIM(layers_with_a_window_may_turn_otherwise)
{
    ar_config c = known(LLAMA, "");
    c.window = 4;
    c.full_attention[0] = 2; /* layer 1 has none */
    cr_expect(ar_config_layer_rope(&c, 0) == &c.rope && ar_config_layer_rope(&c, 1) == &c.rope);
    c.local_rope = (ar_rope){.kind = AR_ROPE_DEFAULT, .theta = 100.0};
    cr_expect(ar_config_layer_rope(&c, 0) == &c.local_rope && ar_config_layer_rope(&c, 1) == &c.rope);
}

CLAIM(a_smaller_head_takes_some_of_the_factors)
{
    ar_config c = known(LLAMA, SCALED("longrope", FACTORS) ",'original_max_position_embeddings':32");
    cr_assert_ok(ari_config_shrink(&c, 2));
    cr_expect(c.head_dim == 4 && c.rope.short_factor[0] == 1.0f && c.rope.short_factor[1] == 2.0f);
    cr_expect(c.rope.long_factor[1] == 5.5f && c.rope.long_factor[2] == 0.0f);
    c = known(LLAMA, SCALED("dynamic", ",'factor':2"));
    cr_expect_eq(ari_config_shrink(&c, 4), AR_ERR_ARG);
    cr_expect_ok(ari_config_shrink(&c, 2));
    cr_expect_eq(c.head_dim, 4);
}

EVERY_CLAIM(config_rope)
