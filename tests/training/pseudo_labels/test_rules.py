"""Every discovered rule labels what it is given; rules that compare images cope with any target."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Survey
from certvol.nn.projection import principal_directions
from certvol.settings import TrainingConfig, settings_of
from certvol.training.pseudo_labels import _comparing, _space, discover
from certvol.training.pseudo_labels._base import PseudoLabelRule
from certvol.training.pseudo_labels._space import MAX_DIMS, comparable_rows, whitening
from certvol.training.pseudo_labels.cluster import Rule, anchored_clusters

RULES = discover()
WHOLE = [name for name, rule in RULES.items() if rule.labels_whole_target]
CLASSES, DIMS = 5, 12


def make_rule(name: str, **settings: object) -> PseudoLabelRule:
    return RULES[name](RULES[name].Config(**settings), TrainingConfig())


def make_survey(
    counts: list[int], noise: float = 0.5, dims: int = DIMS, seed: int = 0
) -> tuple[Survey, Tensor]:
    """Make a shifted target of `counts` images per class, an erring classifier, the truth."""
    generator = torch.Generator().manual_seed(seed)
    means_CD = torch.randn(CLASSES, dims, generator=generator) * 3
    labels_S = torch.arange(CLASSES).repeat_interleave(20)
    source_SD = means_CD[labels_S] + torch.randn(len(labels_S), dims, generator=generator)
    truth_N = torch.arange(CLASSES).repeat_interleave(torch.tensor(counts))
    target_ND = means_CD[truth_N] + 0.5 + torch.randn(len(truth_N), dims, generator=generator)
    logits_NC = F.one_hot(truth_N, CLASSES) + noise * torch.randn(
        len(truth_N), CLASSES, generator=generator
    )
    survey = Survey(target_ND, logits_NC.softmax(dim=1), None, 0, generator, 0, source_SD, labels_S)
    return survey, truth_N


def accuracy(labels_N: Tensor, truth_N: Tensor) -> float:
    return float((labels_N == truth_N).float().mean())


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_one_file_with_a_summary_and_settings_that_explain_themselves(name: str) -> None:
    assert RULES[name].summary
    assert "\n" not in RULES[name].summary
    for each in settings_of(RULES[name].Config):
        assert each.help, each.name
        assert each.fault(each.default) is None
        assert each.fault(-1.0) is not None


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "counts", [[20] * 5, [30, 30, 0, 0, 0], [40, 0, 0, 0, 0], [60, 20, 8, 3, 1]]
)
def test_labels_are_better_than_the_classifiers(name: str, counts: list[int]) -> None:
    """This holds for full, partial, one-class and long-tailed targets."""
    survey, truth_N = make_survey(counts, noise=1.0)
    before = accuracy(survey.probabilities_NC.argmax(dim=1), truth_N)
    labels_N = make_rule(name).label_target(survey)
    assert labels_N.shape == truth_N.shape
    assert accuracy(labels_N, truth_N) > before


@pytest.mark.parametrize("name", WHOLE)
def test_the_same_survey_gives_the_same_labels(name: str) -> None:
    first, second = (make_rule(name).label_target(make_survey([9] * 5)[0]) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("name", "count"), list(itertools.product(WHOLE, [1, 2, 3])))
def test_a_target_of_a_handful_of_images_gets_labels(name: str, count: int) -> None:
    survey, _ = make_survey([count, 0, 0, 0, 0])
    labels_N = make_rule(name).label_target(survey)
    assert labels_N.shape == (count,)
    assert ((labels_N >= 0) & (labels_N < CLASSES)).all()


@pytest.mark.parametrize("name", WHOLE)
def test_a_source_of_one_image_per_class_will_do(name: str) -> None:
    survey, truth_N = make_survey([10] * 5)
    one = Survey(
        survey.features_ND,
        survey.probabilities_NC,
        None,
        0,
        survey.generator,
        0,
        survey.source_features_SD[::20],  # type: ignore[index]
        survey.source_labels_S[::20],  # type: ignore[index]
    )
    assert accuracy(make_rule(name).label_target(one), truth_N) > 0.8


def test_a_class_without_images_gets_no_cluster() -> None:
    survey, _ = make_survey([40, 40, 0, 0, 0], noise=1.2)
    assert set(survey.probabilities_NC.argmax(dim=1).tolist()) == set(range(5))
    assert set(make_rule("cluster").label_target(survey).tolist()) == {0, 1}


@pytest.mark.parametrize(("in_use", "expected"), [(8, 0), (2, 1)])
def test_the_classifier_has_more_of_a_say_the_fewer_classes_are_in_use(
    in_use: int, expected: int
) -> None:
    """An image is closer to the cluster of class 0; the classifier says 1."""
    labels_N = torch.arange(in_use).repeat_interleave(20)
    opinion_NC = 0.93 * F.one_hot(labels_N, 8) + 0.01
    between_1C = torch.tensor([[0.3, 0.6, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01]])
    unit_1D = F.normalize(torch.tensor([[1.0, 0.9, 0, 0, 0, 0, 0, 0]]), dim=1)
    units_ND = torch.cat([torch.eye(8)[labels_N], unit_1D])
    opinions_NC = torch.cat([opinion_NC, between_1C])
    found_N = anchored_clusters(units_ND, opinions_NC, Rule.Config(source_vote=0), torch.eye(8))
    assert found_N[:-1].tolist() == labels_N.tolist()
    assert int(found_N[-1]) == expected


@pytest.mark.parametrize(("source_vote", "expected"), [(0.0, 1), (0.2, 0)])
def test_unknown_images_cannot_push_those_of_a_class_out(source_vote: float, expected: int) -> None:
    """Unknown images fill the cluster of class 0, and that of class 1 is closer to its own ones."""
    own_D, other_D = torch.tensor([[1.0, 0.6]]), torch.tensor([[0.0, 1.0]])
    unknown_D = torch.tensor([[0.94, -0.34]])
    units_ND = F.normalize(torch.cat([own_D] * 20 + [other_D] * 20 + [unknown_D] * 60), dim=1)
    named_N = torch.tensor([1] * 20 + [0] * 60)
    opinion_NC = torch.cat([torch.full((20, 2), 0.5), 0.98 * F.one_hot(named_N, 2) + 0.01])
    source_CD = F.normalize(torch.cat([own_D, other_D]), dim=1)
    config = Rule.Config(source_vote=source_vote)
    found_N = anchored_clusters(units_ND, opinion_NC, config, source_CD)
    assert found_N[:20].tolist() == [expected] * 20
    assert found_N[20:].tolist() == named_N.tolist()


def test_the_source_votes_only_if_features_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    votes: list[float] = []
    monkeypatch.setattr(
        "certvol.training.pseudo_labels.cluster.anchored_clusters",
        lambda *given: (votes.append(given[2].source_vote), given[1].argmax(dim=1))[1],
    )
    survey, _ = make_survey([9] * 5)
    for fixed in (False, True):
        make_rule("cluster").label_target(replace(survey, fixed_features=fixed))
    assert votes == [0.0, 0.2]


@pytest.mark.parametrize(("in_use", "expected"), [(8, 1), (2, 0)])
def test_large_clusters_attract_more_the_fewer_classes_are_in_use(
    in_use: int, expected: int
) -> None:
    """An image is closer to the small cluster of class 1; the classifier cannot decide."""
    sizes = torch.tensor([40, 8] if in_use == 2 else [40] * 8)
    labels_N = torch.arange(in_use).repeat_interleave(sizes)
    opinion_NC = 0.93 * F.one_hot(labels_N, 8) + 0.01
    between_1C = torch.tensor([[0.47, 0.47, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01]])
    unit_1D = F.normalize(torch.tensor([[0.95, 1.0, 0, 0, 0, 0, 0, 0]]), dim=1)
    units_ND = torch.cat([torch.eye(8)[labels_N], unit_1D])
    opinions_NC = torch.cat([opinion_NC, between_1C])
    found_N = anchored_clusters(units_ND, opinions_NC, Rule.Config(source_vote=0), torch.eye(8))
    assert found_N[:-1].tolist() == labels_N.tolist()
    assert int(found_N[-1]) == expected


def test_without_dropping_and_votes_clustering_is_plain_kmeans() -> None:
    """Against a naive loop that starts from the same labels."""
    survey, _ = make_survey([20] * 5, noise=1.0)
    rule = make_rule("cluster", neighbours=1, vote=0.0, drop_below=0.0, rounds=1)
    _, units_ND = comparable_rows(survey)
    from certvol.training.pseudo_labels._graph import nearest_neighbours, smooth

    opinion_NC = smooth(survey.probabilities_NC, nearest_neighbours(units_ND, 1))
    centres = []
    for label in range(CLASSES):
        total_D = torch.zeros(units_ND.shape[1])
        for row_D, share in zip(units_ND, opinion_NC[:, label], strict=True):
            total_D += share * row_D
        centres.append(total_D / total_D.norm())
    expected = [max(range(CLASSES), key=lambda c: float(row @ centres[c])) for row in units_ND]
    survey, _ = make_survey([20] * 5, noise=1.0)
    assert rule.label_target(survey).tolist() == expected


def test_whitening_makes_the_classes_of_the_source_round() -> None:
    generator = torch.Generator().manual_seed(0)
    stretch_DD = torch.diag(torch.tensor([5.0, 1.0, 0.2]))
    labels_S = torch.arange(4).repeat_interleave(500)
    rows_SD = torch.randn(2000, 3, generator=generator) @ stretch_DD + labels_S[:, None]
    matrix_DD = whitening(rows_SD, labels_S, 4)
    residuals_SD = (
        rows_SD - torch.stack([rows_SD[labels_S == c].mean(0) for c in range(4)])[labels_S]
    )
    covariance_DD = residuals_SD.T @ residuals_SD / 2000
    ridge = 0.25 * covariance_DD.square().sum() / covariance_DD.trace()
    expected_DD = torch.linalg.inv(covariance_DD + ridge * torch.eye(3))
    torch.testing.assert_close(matrix_DD @ matrix_DD, expected_DD, rtol=1e-4, atol=1e-5)


def test_principal_directions_span_what_a_full_decomposition_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    scales_D = 0.7 ** torch.arange(40)
    rows_ND = torch.randn(300, 40, generator=generator) * scales_D
    basis_DR = principal_directions(rows_ND, 6, generator)
    torch.testing.assert_close(basis_DR.T @ basis_DR, torch.eye(6), atol=1e-5, rtol=0)
    centred_ND = rows_ND - rows_ND.mean(dim=0)
    best = torch.linalg.svdvals(centred_ND)[:6].square().sum()
    assert float((centred_ND @ basis_DR).square().sum() / best) > 0.9999


def test_wide_features_are_reduced_before_they_are_compared() -> None:
    survey, truth_N = make_survey([20] * 5, dims=MAX_DIMS + 100)
    source_SD, target_ND = comparable_rows(survey)
    assert source_SD.shape[1] == target_ND.shape[1] <= MAX_DIMS
    assert accuracy(make_rule("cluster").label_target(survey), truth_N) > 0.95


@pytest.mark.parametrize("name", WHOLE)
def test_fixed_features_are_compared_once_and_labelled_as_others_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        _comparing, "comparable_rows", lambda survey: (calls.append(1), comparable_rows(survey))[1]
    )
    first, second = (make_survey([20] * 5, noise=noise)[0] for noise in (0.5, 2.0))
    second = replace(second, features_ND=first.features_ND)
    keeping, fresh = make_rule(name), make_rule(name)
    for survey in (first, second):
        expected = fresh.label_target(survey)
        found = keeping.label_target(replace(survey, fixed_features=True))
        assert torch.equal(found, expected)
    assert len(calls) == 1 + 2


def test_directions_of_a_sample_serve_as_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    survey, truth_N = make_survey([40] * 5, dims=MAX_DIMS + 100)
    whole = comparable_rows(survey)
    monkeypatch.setattr(_space, "MOST_ROWS", 64)  # of 300 rows, which are also reduced in chunks
    _, units_ND = comparable_rows(survey)
    assert units_ND.shape[0] == len(truth_N)
    assert accuracy(make_rule("cluster").label_target(survey), truth_N) > 0.95
    monkeypatch.setattr(_space, "MOST_ROWS", 300)
    for found, expected in zip(comparable_rows(survey), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
