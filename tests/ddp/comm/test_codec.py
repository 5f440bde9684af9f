"""Plain values arrive as they were sent; other values and other bytes are errors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp.comm.codec import decode, encode
from ddp.errors import ArgumentError

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(SCALARS, max_size=4)
        | st.dictionaries(SCALARS | st.tuples(SCALARS, SCALARS), inner, max_size=4)
    ),
    max_leaves=12,
)


class Pair(NamedTuple):
    a: int
    b: int


@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    found = decode(encode(value))
    assert repr(found) == repr(value) or found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (5, 7)])
def test_tensors_come_back_bit_by_bit_wherever_they_stand(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).mul(9).to(dtype)
    found = decode(encode({"a": [1, tensor, b"x"], "b": (tensor.t() if tensor.dim() == 2 else tensor,)}))
    assert (found["a"][1].dtype, found["a"][1].shape) == (dtype, tensor.shape)
    assert torch.equal(found["a"][1], tensor)
    assert torch.equal(found["b"][0], tensor.t() if tensor.dim() == 2 else tensor)


def test_other_kinds_of_tensors_and_numbers() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), [1.0, 2.0, 3.0], (4,), check_invariants=True)
    negative = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag  # lazily negated
    leaf = torch.nn.Parameter(torch.ones(2))
    found = decode(encode([sparse, negative, leaf, torch.bfloat16, torch.Size([2, 3]), math.inf]))
    assert torch.equal(found[0].to_dense(), sparse.to_dense())
    assert torch.equal(found[1], negative)
    assert (type(found[2]), found[2].requires_grad) == (torch.Tensor, False)
    assert found[3:] == [torch.bfloat16, (2, 3), math.inf]
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [object()]}, r"value\['a'\]\[0\] is a object"),
        (Pair(1, 2), "is a Pair"),
        ([lambda: 0], r"value\[0\] is a function"),
        ((range(3),), r"value\[0\] is a range"),
    ],
)
def test_what_is_not_plain_is_named_with_its_place(value: Any, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        encode(value)


@given(st.binary(max_size=64))
def test_other_bytes_are_a_value_error_or_a_value(data: bytes) -> None:
    payload = torch.frombuffer(bytearray(data + b"\0" * 8), dtype=torch.uint8)
    try:
        decode(payload)
    except ValueError:
        return


def _payload(tree: bytes) -> torch.Tensor:
    head = len(tree).to_bytes(8, "little") + tree
    return torch.frombuffer(bytearray(head + bytes(-len(head) % 16) + bytes(16)), dtype=torch.uint8)


@pytest.mark.parametrize(
    "tree",
    [
        b'{"tensor": ["load", [1]]}',
        b'{"tensor": ["float32", [-1]]}',
        b'{"tensor": ["float32", [9000000000]]}',
        b'{"eval": ["1"]}',
        b'{"dict": [[{"list": []}, 1]]}',
        b'{"sparse": [[4], ["int64", [1, 1]], ["float32", [2]]]}',
        b'{"a": 1, "b": 2}',
    ],
)
def test_trees_that_no_one_writes_are_value_errors(tree: bytes) -> None:
    with pytest.raises(ValueError, match=r"hold no value|is not|unpack"):
        decode(_payload(tree))
