"""Linear layers cut over tensor-parallel ranks, as plain GEMMs.

Column-parallel layers hold a share of the output features and need no communication; row-parallel
ones hold a share of the input features and sum their partial outputs. The scheme is Megatron-LM's
(Shoeybi et al., 2019, section 3). How a checkpoint stores a weight, formats say.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from workers.layers.formats.format import Cut
from workers.layers.formats.layer import KeptMultiply, LinearLayer, with_bias_
from workers.layers.kept.weight import KeptWeight
from workers.layers.sharding import (
    FusedLayer,
    KVHeadShard,
    ShardContext,
    TensorSource,
    copy_slice,
    divide,
)


def _optional_bias(shard: ShardContext, out_features: int, has_bias: bool) -> nn.Parameter | None:
    return shard.empty_parameter(out_features) if has_bias else None


class ColumnParallelLinear(LinearLayer):
    """y = x W^T + b with the rows of W cut over ranks.

    x (n, in_features) -> (n, out_features / tp_size), this rank's output features.
    """

    def __init__(
        self, in_features: int, out_features: int, has_bias: bool, shard: ShardContext
    ) -> None:
        super().__init__()
        self._whole_shape = (out_features, in_features)
        self._rows = divide(out_features, shard.tp.size, "out_features")
        self._first_row = shard.tp.rank * self._rows
        self.weight = shard.empty_weight(self._rows, in_features)
        self.bias = _optional_bias(shard, self._rows, has_bias)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": self._whole_shape}
        if self.bias is not None:
            shapes["bias"] = self._whole_shape[:1]
        return shapes

    def weight_cuts(self) -> Mapping[str, Cut]:
        rows = slice(self._first_row, self._first_row + self._rows)
        return {"": Cut(self._whole_shape, rows, slice(0, self._whole_shape[1]))}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        rows = slice(self._first_row, self._first_row + self._rows)
        copy_slice(self.get_parameter(name_part), tensor, rows)

    def shard_as_it_lies(self, name_part: str) -> tuple[nn.Parameter, tuple[slice, ...]]:
        rows = slice(self._first_row, self._first_row + self._rows)
        columns = [slice(0, size) for size in self._whole_shape[1:]]
        parameter = self.get_parameter(name_part)
        return parameter, (rows, *columns[: parameter.dim() - 1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)


class _FusedRowsLinear(FusedLayer, LinearLayer):
    """One GEMM over several checkpoint modules, whose rows lie one after another.

    rows_of: checkpoint module -> (rows of the whole weight, first row of this rank, its rows).
    """

    def __init__(
        self,
        in_features: int,
        rows_of: Mapping[str, tuple[int, int, int]],
        has_bias: bool,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        self._in_features = in_features
        self._rows_of = dict(rows_of)
        self.split_sizes = [rows for _, _, rows in rows_of.values()]
        self.weight = shard.empty_weight(sum(self.split_sizes), in_features)
        self.bias = _optional_bias(shard, sum(self.split_sizes), has_bias)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for module, (whole_rows, _, _) in self._rows_of.items():
            shapes[f"{module}.weight"] = (whole_rows, self._in_features)
            if self.bias is not None:
                shapes[f"{module}.bias"] = (whole_rows,)
        return shapes

    def weight_cuts(self) -> Mapping[str, Cut]:
        columns = slice(0, self._in_features)
        return {
            module: Cut((whole_rows, columns.stop), slice(first, first + rows), columns)
            for module, (whole_rows, first, rows) in self._rows_of.items()
        }

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        module, _, parameter = name_part.rpartition(".")
        modules = list(self._rows_of)
        begin = sum(self.split_sizes[: modules.index(module)])
        _, first_row, rows = self._rows_of[module]
        target = self.get_parameter(parameter)[begin : begin + rows]
        copy_slice(target, tensor, slice(first_row, first_row + rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """(parts, n, sum of split_sizes), whose sum over parts is forward(x)."""
        return self.partial_products(x, self.bias)


class MergedColumnParallelLinear(_FusedRowsLinear):
    """Column-parallel modules of equal width that read one input, such as gate_proj and up_proj.

    x (n, in_features) -> (n, len(modules) * out_features / tp_size), the modules' shares in order.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        modules: tuple[str, ...],
        has_bias: bool,
        shard: ShardContext,
    ) -> None:
        rows = divide(out_features, shard.tp.size, "intermediate_size")
        share = (out_features, shard.tp.rank * rows, rows)
        super().__init__(in_features, dict.fromkeys(modules, share), has_bias, shard)


class QKVParallelLinear(_FusedRowsLinear):
    """q_proj, k_proj and v_proj as one GEMM, cut by heads.

    x (n, in_features) -> (n, (tp_q_head_num + 2 * tp_k_head_num) * head_dim): q, then k, then v.
    With fewer KV heads than ranks, tp_size / num_kv_heads neighbouring ranks hold the same one.
    """

    def __init__(
        self,
        in_features: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        has_bias: bool,
        shard: ShardContext,
    ) -> None:
        tp = shard.tp
        self_q_heads = divide(num_q_heads, tp.size, "num_attention_heads")
        kv = KVHeadShard.of_rank(num_kv_heads, tp.rank, tp.size)
        q_rows = self_q_heads * head_dim
        kv_share = (num_kv_heads * head_dim, kv.first_head * head_dim, kv.num_heads * head_dim)
        rows_of = {
            "q_proj": (num_q_heads * head_dim, tp.rank * q_rows, q_rows),
            "k_proj": kv_share,
            "v_proj": kv_share,
        }
        super().__init__(in_features, rows_of, has_bias, shard)
        self.tp_q_head_num = self_q_heads
        self.tp_k_head_num = kv.num_heads
        self._multiply_kv: KeptMultiply | None = None

    def multiply_kept_by(self, make: Callable[[KeptWeight], KeptMultiply]) -> None:
        super().multiply_kept_by(make)
        if self.kept is not None:
            self._multiply_kv = make(self.kept.from_row(self.split_sizes[0]))

    def keys_and_values(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, in_features) -> (parts, n, 2 * tp_k_head_num * head_dim), whose sum over parts is
        k, then v, by their rows of the weight alone."""
        first = self.split_sizes[0]
        bias = None if self.bias is None else self.bias[first:]
        if self._multiply_kv is None:
            return functional.linear(x, self.weight[first:], bias).unsqueeze(0)
        return with_bias_(self._multiply_kv.parts(x), bias)


class RowParallelLinear(LinearLayer):
    """y = sum over ranks of x W^T, plus b once, with the columns of W cut over ranks.

    x (n, in_features / tp_size) -> (n, out_features), whole on every rank.
    """

    def __init__(
        self, in_features: int, out_features: int, has_bias: bool, shard: ShardContext
    ) -> None:
        super().__init__()
        self._tp = shard.tp
        self._whole_shape = (out_features, in_features)
        self._columns = divide(in_features, shard.tp.size, "in_features")
        self._first_column = shard.tp.rank * self._columns
        self.weight = shard.empty_weight(out_features, self._columns)
        self.bias = _optional_bias(shard, out_features, has_bias)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": self._whole_shape}
        if self.bias is not None:
            shapes["bias"] = self._whole_shape[:1]
        return shapes

    def weight_cuts(self) -> Mapping[str, Cut]:
        columns = slice(self._first_column, self._first_column + self._columns)
        return {"": Cut(self._whole_shape, slice(0, self._whole_shape[0]), columns)}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        rows = slice(0, self._whole_shape[0])
        if name_part == "bias":
            copy_slice(self.get_parameter("bias"), tensor, rows)
            return
        columns = slice(self._first_column, self._first_column + self._columns)
        copy_slice(self.weight, tensor, rows, columns)

    def shard_as_it_lies(self, name_part: str) -> tuple[nn.Parameter, tuple[slice, ...]]:
        rows = slice(0, self._whole_shape[0])
        if name_part == "bias":
            return self.get_parameter("bias"), (rows,)
        return self.weight, (rows, slice(self._first_column, self._first_column + self._columns))

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """(parts, n, out_features), whose sum over parts is forward(x)."""
        if self._tp.size > 1:
            return self.forward(x).unsqueeze(0)
        return with_bias_(self.partial_products(x), self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.product(x)
        whole = self._tp.all_reduce(partial)
        return whole if self.bias is None else whole + self.bias
