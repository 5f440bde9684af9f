"""Copies of a state at each commit: no change of the original is missed, and memory is used again."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from ddp.resilience.copies import Copies, copied


@pytest.mark.parametrize("how", ["data", "numpy", "torch"])
def test_every_change_of_a_tensor_comes_into_the_next_copy(how: str) -> None:
    tensor, copies = torch.ones(4), Copies()
    first = copies.of({"average": [tensor]})["average"][0]
    if how == "data":
        tensor.data.mul_(2)
    elif how == "numpy":
        tensor.numpy()[:] = 2
    else:
        tensor.mul_(2)
    second = copies.of({"average": [tensor]})["average"][0]
    assert second.tolist() == [2.0] * 4
    assert second.data_ptr() == first.data_ptr() != tensor.data_ptr()
    tensor.zero_()
    assert second.tolist() == [2.0] * 4


def test_a_module_is_copied_into_the_same_memory_each_time() -> None:
    module, copies = nn.BatchNorm1d(3), Copies()
    first = copies.of(module.state_dict())
    places = {name: value.data_ptr() for name, value in first.items()}
    with torch.no_grad():
        module.weight.fill_(7)
    second = copies.of(module.state_dict())
    assert type(second) is OrderedDict
    assert {name: value.data_ptr() for name, value in second.items()} == places
    assert second["weight"].tolist() == [7.0] * 3
    assert not second["weight"].requires_grad
    assert vars(second)["_metadata"] == vars(module.state_dict())["_metadata"]


def test_views_of_the_same_memory_have_copies_of_their_own() -> None:
    whole, copies = torch.tensor([1 + 2j, 3 - 4j]), Copies()
    value = [whole, whole.conj(), whole[:1], whole.imag, whole.conj().imag]
    for _ in range(2):
        assert [each.tolist() for each in copies.of(value)] == [each.tolist() for each in value]


def test_tensors_made_under_inference_mode_are_copied_too() -> None:
    copies = Copies()
    with torch.inference_mode():
        tensor = torch.ones(2)
        copies.of([tensor])
        tensor.mul_(3)
    assert copies.of([tensor])[0].tolist() == [3.0, 3.0]
    with torch.inference_mode():
        tensor.mul_(3)
    assert copies.of([tensor])[0].tolist() == copied(tensor).tolist() == [9.0, 9.0]
