import copy
from typing import Any

import pytest
import torch

from certvol.nn.norm import SOURCE
from certvol.nn.teacher import Teacher
from support.methods import fitted, make_batch, make_method


def _step(method: Any, seed: int) -> None:
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1)
    method.train()
    method.loss(method.loss_terms(fitted(method, make_batch(seed=seed)))).backward()
    optimizer.step()


def test_a_teacher_is_the_moving_average_of_weights_and_statistics() -> None:
    method = make_method("cvp")
    method.teacher = Teacher(method, method.network, 0.9)
    average = {k: v.clone() for k, v in method.state_dict().items() if not k.startswith("teacher.")}
    for seed in range(3):
        _step(method, seed)
        method.teacher.follow()
        for name, value in average.items():
            value.mul_(0.9).add_(method.state_dict()[name], alpha=0.1)
    with method.teacher.in_charge():
        for name, value in average.items():
            assert torch.allclose(method.state_dict()[name], value, atol=1e-6), name
    assert any("running_mean" in name for name in average)


def test_putting_the_teacher_in_charge_and_back_keeps_weights_and_their_memory() -> None:
    method = make_method("cvp")
    method.teacher = Teacher(method, method.network, 0.9)
    _step(method, 0)
    before = {k: (v.data_ptr(), v.clone()) for k, v in method.state_dict().items()}
    with method.teacher.in_charge():
        inside = method.network.classifier.output.weight.clone()
    assert not torch.equal(inside, method.network.classifier.output.weight)
    for name, value in method.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])


def test_an_error_while_in_charge_gives_the_student_its_weights_back() -> None:
    method = make_method("basic")
    method.teacher = Teacher(method, method.network, 0.9)
    _step(method, 0)
    own = method.network.classifier.output.weight.clone()
    with pytest.raises(ValueError, match="broken"), method.teacher.in_charge():
        raise ValueError("broken")
    assert torch.equal(method.network.classifier.output.weight, own)


def test_handing_over_gives_the_student_the_teachers_weights() -> None:
    method = make_method("basic")
    method.teacher = Teacher(method, method.network, 0.9)
    taught = method.network.classifier.output.weight.clone()
    _step(method, 0)
    method.teacher.hand_over()
    assert torch.equal(method.network.classifier.output.weight, taught)


def test_a_copied_model_has_a_teacher_of_its_own() -> None:
    method = make_method("basic")
    method.teacher = Teacher(method, method.network, 0.9)
    twin = copy.deepcopy(method)
    with torch.no_grad():
        twin.network.classifier.output.weight.zero_()
    twin.teacher.follow()
    assert torch.allclose(
        twin.teacher.get_buffer("network/classifier/output/weight"),
        0.9 * method.network.classifier.output.weight,
    )


def test_a_move_to_another_type_keeps_student_and_teacher_together() -> None:
    method = make_method("basic")
    method.teacher = Teacher(method, method.network, 0.5)
    method.teacher.follow()
    method.double()
    with torch.no_grad():
        method.network.backbone.stages[0][1].running_mean_2C[SOURCE] = 4.0
    method.teacher.start()
    method.teacher.follow()
    own = method.teacher.get_buffer("network/backbone/stages/0/1/running_mean_2C")
    assert own.dtype == torch.float64
    assert own[SOURCE].tolist() == [4.0] * len(own[SOURCE])


def test_student_and_teacher_share_the_methods_other_buffers() -> None:
    method = make_method("ufal", mean_draws=1)
    method.teacher = Teacher(method, method.network, 0.9)
    with method.teacher.in_charge():
        method.class_means_RCD.fill_(5)
    assert (method.class_means_RCD == 5).all()
