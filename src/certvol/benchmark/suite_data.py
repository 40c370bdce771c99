"""Find a suite's data, check it, and give each domain's classes the suite's names."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from certvol.benchmark.suite import Domain, Suite
from certvol.data.digits import digit_domains_exist, write_digit_domains
from certvol.data.folders import class_level, class_of, name_some, printable, reason_of, scan
from certvol.errors import UserError
from certvol.files import fingerprint_of


@dataclass(frozen=True)
class Located:
    """A domain's folder as found."""

    folder: Path
    classes: Mapping[str, str] = field(default_factory=dict)
    """The suite's name of each class -> its folder, relative to the domain's."""
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The listed files of each class, relative to the domain's folder; empty without lists."""
    partial: int = 0
    """The number of classes of a partial target; 0 for a whole domain."""

    def for_runs(self, work: Path) -> Path:
        """Return the folder that runs get.

        Evaluation reads classes from folder names. If some differ from the suite's, or not all
        classes or files belong to the domain, it is a folder in `work` with links under the suite's
        names.
        """
        name = f"{self.folder.name}-{self.partial}" if self.partial else self.folder.name
        renamed = any(Path(place).name != name for name, place in self.classes.items())
        return work / name if renamed or self.partial or self.files else self.folder


def locate(suite: Suite, root: Path | None, tasks: Sequence[str], work: Path) -> dict[str, Located]:
    """Return each domain that the tasks need, by its letter; write nothing.

    Raise UserError with a list of everything that is missing or unexpected.
    """
    needed = {letter for task in tasks for letter in suite.domains_of(task) or ()}
    if suite.own_images:
        own = {letter: d.folders[0] for letter, d in suite.letters.items() if letter in needed}
        made_before = root is not None and digit_domains_exist(root, list(own.values()))
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
        usual, names = domain.folders[0], [name for name in domain.folders if name in present]
        if not names:
            faults.append(f"the domain {usual} is missing (folder {' or '.join(domain.folders)})")
        elif len(names) > 1:
            faults.append(f"several folders of the domain {usual}: {', '.join(names)}")
        else:
            found[domain.letter], wrong = _locate_domain(suite, domain, present[names[0]])
            faults += wrong
    if not faults and not suite.class_names:
        faults = _differing_classes([domain for domain in found.values() if not domain.partial])
    if faults:
        faults = list(dict.fromkeys(faults))  # a partial target repeats those of its domain
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
    if suite.own_images:
        folders = [domain.folder for domain in located.values()]
        write_digit_domains(folders[0].parent, [folder.name for folder in folders])
    for domain in located.values():
        if (folder := domain.for_runs(work)) != domain.folder:
            _link_images(domain, folder)
    return {letter: domain.for_runs(work) for letter, domain in located.items()}


def fingerprints(suite: Suite, located: Mapping[str, Located]) -> dict[str, str]:
    """Return a hash of the names and sizes of each domain's files, by its letter.

    Empty if certvol makes the images itself: these never change.
    """
    if suite.own_images:
        return {}
    listings = {letter: scan(domain.folder) for letter, domain in located.items()}
    return {
        letter: fingerprint_of(os.fsencode("\0".join(each.paths)), each.status_N3[:, 0].tobytes())
        for letter, each in listings.items()
    }


def list_warnings(suite: Suite, located: Mapping[str, Located]) -> list[str]:
    """Name the domains whose published lists of files are not in the root."""
    whole = {domain.folder for domain in located.values() if not domain.files}
    if not suite.file_lists or not whole:
        return []
    names = " and ".join(each.format("DOMAIN") for each in suite.file_lists)
    return [
        f"no {names} beside {name_some(sorted(folder.name for folder in whole))}: every image "
        "counts, also those that the published lists leave out"
    ]


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


def _locate_domain(suite: Suite, domain: Domain, folder: Path) -> tuple[Located, list[str]]:
    """Return a domain's class folders and files, and what is wrong with them."""
    paths = scan(folder).paths
    level = class_level(paths)
    above = f"{paths[0].partition('/')[0]}/" if level else ""
    faults: list[str] = []
    if (listed := _listed_files(suite, folder)) is not None:
        missing = sorted(listed.difference(paths))
        if missing:
            faults.append(f"{folder.name} lacks files of its lists: {name_some(missing)}")
        paths = [path for path in paths if path in listed]
    files: dict[str, list[str]] = {}
    for path in paths:
        if (name := class_of(path, level)) is not None:
            files.setdefault(name, []).append(path)
    folders: dict[str, list[str]] = {}
    for name in sorted(files):
        class_name = suite.class_aliases.get(name.replace("_", "-"), name)
        folders.setdefault(class_name, []).append(above + name)
    faults += _class_faults(suite, folder.name, folders)
    if domain.classes:
        absent = [name for name in domain.classes if name not in folders]
        if absent and not suite.class_names:
            faults.append(f"{folder.name} lacks {name_some(absent)}")
        folders = {name: folders[name] for name in domain.classes if name in folders}
    first = {name: places[0] for name, places in folders.items()}
    own = {name: files[Path(place).name] for name, place in first.items()}
    return Located(folder, first, {} if listed is None else own, len(domain.classes)), faults


def _listed_files(suite: Suite, folder: Path) -> set[str] | None:
    """Return the files of a domain that its published lists name; None if there are no lists.

    A line holds a file, relative to the root, and its class's number.
    """
    lists = [folder.parent / name.format(folder.name) for name in suite.file_lists]
    present = [place for place in lists if place.exists()]
    if not present:
        return None
    if len(present) < len(lists):
        absent = [place.name for place in lists if place not in present]
        raise UserError(
            f"{printable(str(present[0]))} is there, but not {name_some(absent)}; add it, or "
            "remove both lists to use every image"
        )
    listed: set[str] = set()
    for place in lists:
        try:
            lines = place.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {printable(str(place))}: {reason_of(error)}") from None
        paths = [line.rpartition(" ")[0] or line for line in lines if line.strip()]
        listed.update(path.partition("/")[2] for path in paths)
    return listed


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


def _link_images(domain: Located, folder: Path) -> None:
    """Make links to the class folders or, if only listed files belong to them, to these files."""
    links: dict[Path, str] = {}
    for name, class_folder in domain.classes.items():
        if domain.files:
            links |= {folder / name / Path(file).name: file for file in domain.files[name]}
        else:
            links[folder / name] = class_folder
    for parent in {link.parent for link in links}:
        parent.mkdir(parents=True, exist_ok=True)
    aim_folder = domain.folder.absolute()
    for link, place in links.items():
        aim = aim_folder / place
        if link.is_symlink() and link.readlink() != aim:
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(aim, target_is_directory=not domain.files)
