"""Whatever a configuration holds, it is read or refused with a sentence."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvblocks.formats import KVFormat
from kvblocks.planner.architectures import ARCHITECTURES, describe
from kvblocks.planner.footprint import footprint
from kvblocks.planner.models import BUILT_IN
from kvblocks.planner.weights import from_model
from kvblocks.report import UserError

FIELDS = sorted(
    {name for config in BUILT_IN.values() for name in config}
    | {name for architecture in ARCHITECTURES.values() for name in architecture.defaults}
    | {
        "attn_config",
        "block_configs",
        "per_layer_config",
        "text_config",
        "hybrid_override_pattern",
        "block_types",
    }
    | {"no_rope_layers", "full_attn_idxs", "attn_type_list", "linear_attn_config", "hybrid_layer_pattern"}
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.just(10**400), st.floats(), st.text(max_size=5),
    st.sampled_from(["auto", "bfloat16", "M*-E", "full_attention", "sliding_attention"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*FIELDS, "attention", "0", "no_op"]), inner, max_size=3),
    ),
    max_leaves=6,
)
configs = st.fixed_dictionaries(
    {"model_type": st.sampled_from(sorted(ARCHITECTURES)), "num_hidden_layers": st.integers(1, 6)},
    optional={
        "num_attention_heads": st.just(4), "hidden_size": st.just(64), "num_key_value_heads": st.sampled_from([1, 2, 3])
    },
)  # fmt: skip


@given(
    config=configs,
    changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=4),
    ranks=st.integers(1, 4),
)
def test_a_configuration_is_read_or_refused(
    config: dict[str, Any], changes: dict[str, Any], ranks: int
) -> None:
    try:
        model = describe(config | changes, "config.json")
        sizes = footprint(model, KVFormat.parse("int8"), block_size=16, num_ranks=ranks)
        from_model(model, "int8")
    except UserError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert sizes.sequence_total(100) >= sizes.token_bytes(100) >= 0
        json.dumps(dict(model.assumed))
    assert "\n" not in refusal
    assert len(refusal) < 1000
