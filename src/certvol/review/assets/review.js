// Show one image at a time, send each answer at once, and show what the labels say.

import { makeSearch } from "./typing.js";

const AHEAD = 3; // images that are loaded before they are shown
const $ = (id) => document.getElementById(id);
const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
const percent = (share) => `${(100 * share).toFixed(1)} %`;

let data, search, current = -1, busy = false;
const loaded = new Map();

async function ask(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The review has ended. Start `certvol review` again and open its new address; every answer is saved.");
  }
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// Number keys choose the likeliest classes by place, unless classes are digits themselves.
let digits;
const keyOf = (label, place) => (digits ? (/^\d$/.test(data.classes[label]) ? data.classes[label] : "") : String(place + 1));

function button(label, place) {
  const made = make("button");
  made.type = "button";
  const key = keyOf(label, place);
  if (key) {
    made.append(make("kbd", key));
    made.setAttribute("aria-keyshortcuts", key);
  }
  made.append(make("span", data.classes[label]));
  made.addEventListener("click", () => answer("class", label));
  return made;
}

function load(number) {
  if (number >= data.items.length || loaded.has(number)) return;
  const image = new Image();
  image.src = `image/${number}`;
  loaded.set(number, image);
  if (loaded.size > 20) loaded.delete(loaded.keys().next().value);
}

function show(number) {
  current = number;
  const item = data.items[number];
  const isDone = item === undefined;
  $("work").hidden = isDone;
  $("done").hidden = !isDone;
  search.clear();
  showProgress();
  if (isDone) {
    $("done-title").focus();
    return;
  }
  const picture = $("picture");
  $("broken").hidden = true;
  picture.classList.remove("tiny");
  picture.removeAttribute("src");
  picture.src = `image/${number}`;
  picture.alt = `Image ${number + 1} of ${data.items.length}`;
  $("name").textContent = item.name;
  $("likeliest").replaceChildren(...item.likeliest.map(button));
  const random = item.kind === "random";
  $("phase").className = item.kind;
  $("phase").replaceChildren(
    make("b", random ? "Random image" : "Chosen image"),
    random ? " – measures how good the run is" : " – its label helps training most; it does not change the figures",
  );
  for (let i = 1; i <= AHEAD; i++) load(number + i);
}

function showProgress() {
  const count = (kind) => data.items.filter((item) => item.kind === kind);
  const answered = data.items.filter((item) => item.answer).length;
  for (const kind of ["random", "chosen"]) {
    const all = count(kind);
    const part = document.querySelector(`.part.${kind}`);
    part.hidden = all.length === 0;
    part.firstElementChild.style.width = `${(100 * all.filter((item) => item.answer).length) / Math.max(1, all.length)}%`;
  }
  $("progress").setAttribute("aria-valuemax", data.items.length);
  $("progress").setAttribute("aria-valuenow", answered);
  $("count").textContent = `${answered} of ${data.items.length} labelled`;
  $("undo").disabled = $("undo-last").disabled = answered === 0;
}

function put(id, value, words) {
  $(id).querySelector(".value").textContent = value;
  $(id).querySelector(".words").textContent = words;
}

function showShare(id, interval, nothing) {
  const bar = $(id).querySelector(".bar");
  bar.hidden = !interval;
  if (!interval) {
    put(id, "–", nothing);
    return;
  }
  put(id, percent(interval.estimate), `between ${percent(interval.low)} and ${percent(interval.high)}`);
  const [range, mark] = bar.children;
  range.style.left = percent(interval.low).replace(" ", "");
  range.style.width = percent(interval.high - interval.low).replace(" ", "");
  mark.style.left = percent(interval.estimate).replace(" ", "");
}

function showFigures() {
  const found = data.estimates;
  showShare("accuracy", found.accuracy, "no random image has a label yet");
  $("before").hidden = !found.before;
  if (found.before) showShare("before", found.before, "");
  if (found.accuracy && found.bounds) {
    const [low, high] = found.bounds.map(percent);
    $("accuracy").querySelector(".words").textContent += ` (${found.unsure} not sure left out; between ${low} and ${high} of all)`;
  }
  $("about").textContent = found.sentences.about;
  $("about").hidden = !found.sentences.about;
  const rule = found.threshold;
  const limit = `if at most ${percent(found.max_error)} may be wrong`;
  if (rule.threshold !== null) put("threshold", percent(rule.coverage), `of all images ${limit}`);
  else if (rule.needed > found.images) put("threshold", "–", `no threshold ${limit}: the target has too few images`);
  else if (rule.needed !== null) put("threshold", "–", `no threshold yet ${limit}; about ${rule.needed} random labels should be enough`);
  else put("threshold", "none", `no threshold yet ${limit}: even the most certain images are wrong too often`);
  $("more").hidden = !found.to_halve;
  put("more", `+ ${found.to_halve}`, "random labels");
  const extra = [`${found.random} random`, `${found.chosen} chosen`];
  if (found.none) extra.push(`${found.none} of no class`);
  if (found.unsure) extra.push(`${found.unsure} not sure`);
  $("counts").textContent = `Labels: ${extra.join(", ")}`;
}

function describe(said) {
  const item = data.items[current];
  if (!item) return `${said} All images are labelled.`;
  const choices = item.likeliest.map((label, i) => `${keyOf(label, i)} ${data.classes[label]}`).join(", ");
  return `${said} Image ${current + 1} of ${data.items.length}, ${item.kind}. Likeliest: ${choices}.`;
}

const firstOpen = () => {
  const found = data.items.findIndex((item) => !item.answer);
  return found < 0 ? data.items.length : found;
};

async function once(work) {
  if (busy) return;
  busy = true;
  try {
    await work();
    $("error").hidden = true;
  } catch (error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
  } finally {
    busy = false;
  }
}

function answer(kind, label = null) {
  const number = current;
  if (!data.items[number]) return;
  once(async () => {
    const found = await ask("answer", { item: number, answer: kind, label });
    data.items[number].answer = { answer: kind, label };
    data.estimates = found.estimates;
    showFigures();
    show(firstOpen());
    const said = { class: data.classes[label], none: "None of these classes", unsure: "Not sure" }[kind];
    $("live").textContent = describe(`${said}.`);
  });
}

function undo() {
  once(async () => {
    const found = await ask("undo", {});
    if (found.item === null) return;
    data.items[found.item].answer = null;
    data.estimates = found.estimates;
    showFigures();
    show(found.item);
    $("live").textContent = describe("Undone.");
  });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || !data) return;
  const typing = document.activeElement === search.input && search.input.value !== "";
  if (typing || event.key === "Tab" || event.key === " " || event.key === "Enter") return;
  const item = data.items[current];
  if (event.key === "Backspace") undo();
  else if (!item) return;
  else if (event.key === "-") answer("none");
  else if (event.key === "?") answer("unsure");
  else if (/^\d$/.test(event.key)) {
    const label = digits ? data.classes.indexOf(event.key) : item.likeliest[Number(event.key) - 1] ?? -1;
    if (label >= 0) answer("class", label);
  } else if (event.key.length === 1) {
    search.input.focus();
    return; // the letter goes into the field
  } else return;
  event.preventDefault();
}

async function start() {
  data = await ask("data");
  digits = data.classes.some((name) => /^\d$/.test(name));
  $("run").textContent = data.run;
  document.title = `Label images: ${data.run}`;
  $("next").textContent = `certvol adapt --from ${data.path} --labels ${data.path}/review.csv --out NEW_RUN`;
  $("use").textContent = `certvol predict ${data.path} IMAGES --max-error ${data.estimates.max_error} --out predictions.csv`;
  search = makeSearch(data.classes, (label) => answer("class", label));
  $("picture").addEventListener("error", () => { $("broken").hidden = false; });
  $("picture").addEventListener("load", () => {
    const { naturalWidth, naturalHeight } = $("picture");
    $("picture").classList.toggle("tiny", Math.max(naturalWidth, naturalHeight) <= 64);
  });
  $("none").addEventListener("click", () => answer("none"));
  $("unsure").addEventListener("click", () => answer("unsure"));
  $("undo").addEventListener("click", undo);
  $("undo-last").addEventListener("click", undo);
  document.addEventListener("keydown", onKey);
  showFigures();
  show(firstOpen());
  $("live").textContent = describe("");
}

once(start);
