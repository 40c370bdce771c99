import pytest
import torch

from support.methods import make_batch, make_method


def test_terms_are_those_of_cdan_and_mcc() -> None:
    method = make_method("sdat", bottleneck=12, temperature=1.5, confusion_weight=3.0).train()
    method.network.classifier.dropout = 0.0
    twin = make_method("cdan", bottleneck=12).train()
    twin.load_state_dict(method.state_dict())
    twin.network.classifier.dropout = 0.0
    terms, theirs = method.loss_terms(make_batch()), twin.loss_terms(make_batch())
    assert {name: terms[name].item() for name in theirs} == {
        name: value.item() for name, value in theirs.items()
    }
    with torch.no_grad():
        _, logits = method.compared(make_batch().inputs)
    p = torch.softmax(logits[8:] / 1.5, 1)
    sure = 1 + torch.exp((p * p.log()).sum(1))
    confusion = torch.einsum("n,na,nb->ab", 8 * sure / sure.sum(), p, p)
    confusion = confusion / confusion.sum(1, keepdim=True)
    expected = (confusion.sum() - confusion.trace()) / 4
    assert terms["confusion"].item() == pytest.approx(expected.item(), rel=1e-4)
    whole = theirs["ce"] + theirs["adversarial"] + 3 * expected
    assert method.loss(terms).item() == pytest.approx(whole.item(), rel=1e-4)
    climbed = theirs["ce"] + 3 * expected
    assert method.sam_loss(terms).item() == pytest.approx(climbed.item(), rel=1e-4)


def test_only_this_method_climbs_unless_its_radius_is_0() -> None:
    assert make_method("sdat").sam_radius == 0.02
    assert make_method("sdat", radius=0.0).sam_radius == 0
    assert make_method("cdan").sam_radius == 0
