"""Layers that keep a state of fixed size: Mamba, Mamba-2, gated delta networks, linear attention, short convolutions.

Owns how each kind's state follows from the fields of its model type. A causal convolution of width k keeps its last
k - 1 inputs. Convolutions are kept in the model's dtype; recurrent states too, unless the configuration names
another dtype for them.
"""

from typing import Final

from kvblocks.planner.fields import Fields
from kvblocks.planner.model import DTYPE_BYTES, State, StatePart

_STATE_DTYPES: Final = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")


def model_dtype(fields: Fields) -> str:
    """The dtype of the weights; float16 where the configuration names none, as recorded."""
    name = fields.choice(DTYPE_BYTES, "torch_dtype", "dtype")
    if name is None:
        fields.assumed["torch_dtype"] = name = "float16"
    return name


def mamba(fields: Fields) -> State:
    """Mamba: a convolution over the inner channels, and `state_size` numbers for each of them."""
    inner = fields.optional_integer("intermediate_size") if fields.find("state_size") else None
    if inner is None:
        inner = fields.integer("mamba_expand", "expand") * fields.integer("hidden_size")
    width = fields.integer("mamba_d_conv", "conv_kernel")
    size = fields.integer("mamba_d_state", "state_size")
    return State(
        "Mamba",
        (
            StatePart("convolution channels", inner, width - 1, model_dtype(fields)),
            StatePart("state channels", inner, size, _state_dtype(fields)),
        ),
    )


def mamba2(fields: Fields) -> State:
    """Mamba-2: a convolution over the inner channels and the groups' B and C, and a matrix for each head."""
    num_heads = fields.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    names = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    head_dim = None if fields.find(*names) == "auto" else fields.optional_integer(*names)
    inner = fields.optional_integer("mamba_d_ssm") if head_dim is None else num_heads * head_dim
    if inner is None:
        inner = fields.integer("mamba_expand", "expand") * fields.integer("hidden_size")
    if inner % num_heads:
        raise fields.error(f"{num_heads} Mamba heads do not divide {inner} inner channels")
    width = fields.integer("mamba_d_conv", "conv_kernel")
    size = fields.integer("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.integer("mamba_n_groups", "n_groups", "mamba_ngroups")
    return State(
        "Mamba-2",
        (
            StatePart("convolution channels", inner, width - 1, model_dtype(fields)),
            StatePart("convolution groups", groups, 2 * size * (width - 1), model_dtype(fields)),
            StatePart("state heads", num_heads, inner // num_heads * size, _state_dtype(fields)),
        ),
    )


def gated_delta_net(fields: Fields) -> State:
    """Gated delta network: a convolution over Q, K and V, and a matrix of K by V for each V head."""
    key_heads, key_dim = fields.integer("linear_num_key_heads"), fields.integer("linear_key_head_dim")
    value_heads, value_dim = fields.integer("linear_num_value_heads"), fields.integer("linear_value_head_dim")
    width = fields.integer("linear_conv_kernel_dim")
    return State(
        "gated delta network",
        (
            StatePart("convolution K heads", key_heads, 2 * key_dim * (width - 1), model_dtype(fields)),
            StatePart("convolution V heads", value_heads, value_dim * (width - 1), model_dtype(fields)),
            StatePart("state heads", value_heads, key_dim * value_dim, _state_dtype(fields)),
        ),
    )


def kimi_delta(fields: Fields) -> State:
    """Kimi delta attention: three convolutions of all heads, and a square matrix for each head, in float32."""
    inner = fields.nested("linear_attn_config") if fields.find("linear_attn_config") else fields
    heads = inner.integer("num_heads", "linear_num_heads")
    dim = inner.integer("head_dim", "linear_head_dim")
    width = inner.integer("short_conv_kernel_size", "linear_conv_kernel_dim")
    return State(
        "Kimi delta attention",
        (
            StatePart("convolution heads", heads, 3 * dim * (width - 1), model_dtype(fields)),
            StatePart("state heads", heads, dim * dim, "float32"),
        ),
    )


def lightning(fields: Fields) -> State:
    """Linear attention without convolution: a square matrix for each query head."""
    heads = fields.integer("num_attention_heads")
    dim = fields.optional_integer("head_dim") or fields.integer("hidden_size") // heads
    return State("linear attention", (StatePart("state heads", heads, dim * dim, _state_dtype(fields)),))


def short_convolution(fields: Fields) -> State:
    """A gated short convolution over the hidden channels."""
    width = fields.integer("conv_L_cache")
    channels = fields.integer("hidden_size")
    return State("short convolution", (StatePart("channels", channels, width - 1, model_dtype(fields)),))


def gated_recurrence(fields: Fields) -> State:
    """A real-gated linear recurrent unit, whose state is float32, behind a convolution."""
    channels = fields.optional_integer("lru_width") or fields.integer("hidden_size")
    width = fields.integer("conv1d_width")
    return State(
        "gated linear recurrence",
        (
            StatePart("convolution channels", channels, width - 1, model_dtype(fields)),
            StatePart("state channels", channels, 1, "float32"),
        ),
    )


def _state_dtype(fields: Fields) -> str:
    return fields.choice(DTYPE_BYTES, *_STATE_DTYPES) or model_dtype(fields)
