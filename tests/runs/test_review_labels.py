"""RUN/review.csv: the last answer counts, a torn line does not, and mistakes are named."""

from pathlib import Path

import pytest

from certvol.errors import UserError
from certvol.runs.review_labels import Review, parse_review, read_review, row_of_path

HEAD = "path,label,answer,kind\n"
CLASSES = ["Mug", "=Bike", "a,b"]


def test_every_answer_is_read(tmp_path: Path) -> None:
    lines = ["a.jpg,Mug,class,random", "b.jpg,,none,random", "c.jpg,,unsure,chosen"]
    file = tmp_path / "review.csv"
    file.write_text(HEAD + "\n".join([*lines, '"x, y.jpg","a,b",class,chosen', ""]))
    assert read_review(file, CLASSES) == [
        Review("a.jpg", "Mug", "random"),
        Review("b.jpg", None, "random", "none"),
        Review("c.jpg", None, "chosen", "unsure"),
        Review("x, y.jpg", "a,b", "chosen"),
    ]


def test_the_last_answer_counts_and_undone_ones_are_gone() -> None:
    lines = ["a,Mug,class,random", "b,Mug,class,random", "a,,none,random", "b,,undone,random"]
    found = parse_review(HEAD + "\n".join(lines) + "\n", "file", CLASSES)
    assert found == [Review("a", None, "random", "none")]


def test_a_plain_table_holds_classes_of_chosen_images() -> None:
    found = parse_review("\ufeffignored,label,path\r\n1,Mug,./a b.jpg\r\n".lstrip("\ufeff"), "file")
    assert found == [Review("a b.jpg", "Mug", "chosen")]


def test_cells_that_spreadsheets_would_run_are_read_with_and_without_their_mark() -> None:
    text = HEAD + "./=a.jpg,'=Bike,class,random\n=b.jpg,=Bike,class,random\n"
    found = parse_review(text, "file", CLASSES)
    assert [each.label for each in found] == ["=Bike", "=Bike"]
    assert [each.path for each in found] == ["./=a.jpg", "./=b.jpg"]


@pytest.mark.parametrize("end", range(1, len("b.jpg,Mug,class,random")))
def test_a_line_torn_anywhere_does_not_count(end: int) -> None:
    whole = HEAD + "a.jpg,Mug,class,random\n"
    torn = "b.jpg,Mug,class,random"[:end]
    found = parse_review(whole + torn, "file", CLASSES, may_be_torn=True)
    assert found == [Review("a.jpg", "Mug", "random")]
    if torn.endswith("class,"):
        return  # a whole row whose kind is not given
    with pytest.raises(UserError, match="row 3 of file"):
        parse_review(whole + torn, "file", CLASSES)


def test_a_last_line_without_its_end_counts_if_it_is_whole() -> None:
    assert len(parse_review(HEAD + "a,Mug,class,random\nb,Mug,class,chosen", "file")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("image,label\na,Mug\n", "columns path,label, found image,label"),
        (HEAD + "a,Mug\n", "row 2 of file has 2 cells instead of 4"),
        (HEAD + ",Mug,class,random\n", "row 2 of file has no path"),
        (HEAD + "a,,class,random\n", "row 2 of file: `` is not a class"),
        (HEAD + "a,Mugg,class,random\n", "`Mugg` is not a class of the run; did you mean `Mug`"),
        (HEAD + "a,Mug,yes,random\n", "has the answer `yes`"),
        (HEAD + "a,Mug,class,other\n", "has the kind `other`"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_review(text, "file", CLASSES)
    assert message in str(error.value)


def test_a_file_that_is_missing_or_not_text_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        read_review(tmp_path / "review.csv")
    (tmp_path / "review.csv").write_bytes(b"path,label\n\xff\xfe,x\n")
    with pytest.raises(UserError, match="not UTF-8"):
        read_review(tmp_path / "review.csv")


def test_two_images_of_one_path_cannot_be_labelled() -> None:
    assert row_of_path(["a.png", "=b.png"]) == {"a.png": 0, "./=b.png": 1}
    with pytest.raises(UserError, match=r"two target images have the path \./=b\.png"):
        row_of_path(["=b.png", "a.png", "./=b.png"])
