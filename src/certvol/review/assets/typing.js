// Find a class by a few typed letters, and choose it in a list (an ARIA combobox).

const MOST = 30;

const plain = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase().replace(/[_\-\s]+/g, " ").trim();

// Names that begin with the words come first, then names with a word that does, then the others.
export function matching(names, text) {
  const wanted = plain(text);
  if (!wanted) return [];
  const found = [[], [], []];
  names.forEach((name, label) => {
    const at = name.indexOf(wanted);
    if (at === 0) found[0].push(label);
    else if (name.includes(` ${wanted}`)) found[1].push(label);
    else if (at > 0) found[2].push(label);
  });
  return found.flat().slice(0, MOST);
}

export function makeSearch(classes, choose) {
  const input = document.getElementById("search");
  const list = document.getElementById("matches");
  const names = classes.map(plain);
  let labels = [];
  let active = 0;

  function show() {
    labels = matching(names, input.value);
    active = 0;
    const isOpen = input.value.trim() !== "";
    list.replaceChildren(...labels.map((label, i) => {
      const item = document.createElement("li");
      item.id = `match-${i}`;
      item.setAttribute("role", "option");
      item.textContent = classes[label];
      item.addEventListener("pointerdown", (event) => event.preventDefault());
      item.addEventListener("click", () => take(i));
      return item;
    }));
    if (isOpen && !labels.length) {
      const none = document.createElement("li");
      none.setAttribute("role", "option");
      none.setAttribute("aria-disabled", "true");
      none.textContent = "No class has this name";
      list.append(none);
    }
    list.hidden = !isOpen;
    input.setAttribute("aria-expanded", String(isOpen));
    mark();
  }

  function mark() {
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === active && labels.length > 0)));
    if (labels.length) {
      input.setAttribute("aria-activedescendant", `match-${active}`);
      list.children[active].scrollIntoView({ block: "nearest" });
    } else {
      input.removeAttribute("aria-activedescendant");
    }
  }

  function clear() {
    if (input.value) input.value = "";
    show();
  }

  function take(i) {
    const label = labels[i];
    clear();
    input.blur();
    choose(label);
  }

  input.addEventListener("input", show);
  input.addEventListener("blur", () => { list.hidden = true; input.setAttribute("aria-expanded", "false"); });
  input.addEventListener("focus", show);
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.isComposing) return;
    if (step && labels.length) {
      active = (active + step + labels.length) % labels.length;
      mark();
      event.preventDefault();
    } else if (event.key === "Enter" && labels.length) {
      take(active);
      event.preventDefault();
    } else if (event.key === "Escape") {
      clear();
      input.blur();
      event.preventDefault();
    }
  });
  return { input, clear };
}
