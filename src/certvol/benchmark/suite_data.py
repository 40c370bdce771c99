"""Find a suite's data, check it, and give each domain's classes the suite's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from certvol.benchmark.suites import Suite
from certvol.data.folders import class_level, class_of, name_some, printable, scan
from certvol.errors import UserError


@dataclass(frozen=True)
class Located:
    """A domain's folder as found."""

    folder: Path
    classes: Mapping[str, str] = field(default_factory=dict)
    """The suite's name of each class -> its folder, relative to the domain's."""

    def for_runs(self, work: Path) -> Path:
        """Return the folder that runs get.

        Evaluation reads classes from folder names. If some differ from the suite's, it is a folder
        in `work` with links under the suite's names.
        """
        renamed = any(Path(place).name != name for name, place in self.classes.items())
        return work / self.folder.name if renamed else self.folder


def locate(suite: Suite, root: Path | None, tasks: Sequence[str], work: Path) -> dict[str, Located]:
    """Return each domain that the tasks need, by its letter; write nothing.

    Raise UserError with a list of everything that is missing or unexpected.
    """
    needed = {letter for task in tasks for letter in task.split("-")}
    if suite.own_images is not None:
        own = {letter: d.folders[0] for letter, d in suite.letters.items() if letter in needed}
        made_before = root is not None and suite.own_images.exist(root, list(own.values()))
        place = root if root is not None and made_before else work
        return {letter: Located(place / name) for letter, name in own.items()}
    if root is None:
        raise UserError(
            f"{suite.name} needs --data ROOT, a folder with {suite.folders}; get the data from "
            f"{suite.where}"
        )
    if not root.is_dir():
        raise UserError(
            f"folder {printable(str(root))} not found; check --data, or get {suite.name} from "
            f"{suite.where}"
        )
    present = {entry.name: entry for entry in sorted(root.iterdir()) if entry.is_dir()}
    faults: list[str] = []
    found: dict[str, Located] = {}
    for domain in suite.domains:
        if domain.letter not in needed:
            continue
        names = [name for name in domain.folders if name in present]
        if len(names) != 1:
            accepted = " or ".join(domain.folders)
            faults.append(
                f"several folders of the domain {domain.folders[0]}: {', '.join(names)}"
                if names
                else f"the domain {domain.folders[0]} is missing (folder {accepted})"
            )
            continue
        folders = _class_folders(suite, present[names[0]])
        faults += _class_faults(suite, names[0], folders)
        first = {name: places[0] for name, places in folders.items()}
        found[domain.letter] = Located(present[names[0]], first)
    if not faults and not suite.class_names:
        faults = _differing_classes(list(found.values()))
    if faults:
        known = {name for domain in suite.domains for name in domain.folders}
        extra = [name for name in present if name not in known and not name.startswith(".")]
        faults += [f"other folders there: {name_some(extra)}"] if extra else []
        raise UserError(
            f"{printable(str(root))} does not hold {suite.name}: {'; '.join(faults)}. Expected: "
            f"{suite.folders} with {suite.classes} class folders each; get them from {suite.where}"
        )
    return found


def prepare(suite: Suite, located: Mapping[str, Located], work: Path) -> dict[str, Path]:
    """Make the suite's own images and links to renamed classes; return the runs' folders."""
    if suite.own_images is not None:
        folders = [domain.folder for domain in located.values()]
        suite.own_images.write(folders[0].parent, [folder.name for folder in folders])
    for domain in located.values():
        if (folder := domain.for_runs(work)) != domain.folder:
            _link_classes(domain, folder)
    return {letter: domain.for_runs(work) for letter, domain in located.items()}


def count_warnings(suite: Suite, folders: Mapping[str, Path]) -> list[str]:
    """Compare the image counts with the published ones."""
    counts = {letter: len(scan(folder).paths) for letter, folder in folders.items()}
    published = f"the published {suite.name}"
    warnings = []
    for letter, folder in folders.items():
        expected = suite.letters[letter].images
        if expected is not None and counts[letter] != expected:
            warnings.append(
                f"{folder.name} has {counts[letter]:,} images, {published} {expected:,}"
            )
    total, expected = sum(counts.values()), suite.total_images
    if expected is not None and len(counts) == len(suite.letters) and total != expected:
        names = ", ".join(folder.name for folder in folders.values())
        warnings.append(f"{names} together have {total:,} images, {published} {expected:,}")
    return warnings


def _class_folders(suite: Suite, folder: Path) -> dict[str, list[str]]:
    """Return the suite's name of each class that has images -> its folders below the domain's."""
    paths = scan(folder).paths
    level = class_level(paths)
    above = f"{paths[0].partition('/')[0]}/" if level else ""
    folders: dict[str, list[str]] = {}
    for name in sorted({name for path in paths if (name := class_of(path, level)) is not None}):
        class_name = suite.class_aliases.get(name.replace("_", "-"), name)
        folders.setdefault(class_name, []).append(above + name)
    return folders


def _class_faults(suite: Suite, domain: str, found: Mapping[str, Sequence[str]]) -> list[str]:
    if not suite.class_names:
        wrong = f"{domain} has {len(found)} classes with images, not {suite.classes}"
        return [wrong] if len(found) != suite.classes else []
    faults = [
        f"{domain} has {len(places)} folders of the class {name}: {name_some(places)}; join them"
        for name, places in found.items()
        if len(places) > 1
    ]
    missing = [name for name in suite.class_names if name not in found]
    extra = [name for name in found if name not in suite.class_names]
    faults += [f"{domain} lacks {name_some(missing)}"] if missing else []
    return faults + ([f"{domain} has extra classes: {name_some(extra)}"] if extra else [])


def _differing_classes(domains: Sequence[Located]) -> list[str]:
    anywhere = {name for domain in domains for name in domain.classes}
    return [
        f"{domain.folder.name} lacks {name_some(sorted(missing))}, which other domains have"
        for domain in domains
        if (missing := anywhere - set(domain.classes))
    ]


def _link_classes(domain: Located, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in domain.classes.items():
        link, aim = folder / name, (domain.folder / place).absolute()
        if link.is_symlink() and link.readlink() != aim:
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(aim, target_is_directory=True)
