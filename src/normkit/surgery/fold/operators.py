"""The operators of torch that folding knows, by what they do to values."""

# Operators that move values without changing them.
MOVES = frozenset(
    {
        "_reshape_alias",
        "_to_copy",
        "_unsafe_view",
        "alias",
        "cat",
        "channel_shuffle",
        "clone",
        "contiguous",
        "detach",
        "flip",
        "lift_fresh",
        "native_channel_shuffle",
        "permute",
        "pixel_shuffle",
        "pixel_unshuffle",
        "roll",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    }
)
# Operators that average values with weights that sum to one: a constant stays the same constant.
AVERAGES = frozenset(
    {
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "avg_pool2d",
        "avg_pool3d",
        "mean",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "upsample_trilinear3d",
    }
)
# Operators that put constants around values.
PADS = frozenset({"constant_pad_nd"})
# Operators that make new memory, which may be filled later.
MAKES = frozenset({"empty", "empty_strided", "new_empty", "new_zeros", "zeros"})
# Operators that read only the shape and type of a tensor.
LIKE = MAKES | frozenset(
    {"empty_like", "full_like", "new_full", "new_ones", "ones_like", "rand_like", "randn_like", "zeros_like"}
)
# Operators that multiply by a weight.
PRODUCTS = frozenset({"addmm", "bmm", "convolution", "mm"})
# Operators whose output is a view of a weight, or a copy in another type or order.
VIEWS = frozenset(
    {
        "_to_copy",
        "_unsafe_view",
        "alias",
        "clone",
        "detach",
        "expand",
        "permute",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    }
)
# Those of them that are not views, or that change nothing.
COPIES = frozenset({"_to_copy", "alias", "clone", "detach"})
