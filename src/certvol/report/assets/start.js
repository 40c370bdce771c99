// Shared by all scripts: the data, elements, numbers as text, the tip, the theme. Text enters the page only as text.
const data = JSON.parse(document.getElementById('data').textContent);
const byId = (id) => document.getElementById(id);
const SVG = 'http://www.w3.org/2000/svg';

function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function draw(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Escape characters that are invisible or change the direction of the text.
function shown(text) {
  return String(text).replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu, (c) => {
    const code = c.codePointAt(0);
    return { 10: '\\n', 13: '\\r', 9: '\\t' }[code] || (code < 256 ? '\\x' + code.toString(16).padStart(2, '0') : '\\u' + code.toString(16).padStart(4, '0'));
  });
}

const whole = (value) => Math.round(value).toLocaleString('en-US');
// Round as Python does: a value exactly between two goes to the even one, 10.25 to 10.2. Never -0.00.
function fixed(value, digits) {
  const exact = Math.abs(value).toFixed(digits + 40), end = exact.length - 40, down = exact.slice(0, end);
  const even = /[02468]$/.test(down), between = /^50*$/.test(exact.slice(end));
  const text = between && even ? down : Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? '-' + text : text;
}
const percent = (share, digits = 1) => (share === null || Number.isNaN(share) ? '–' : fixed(100 * share, digits) + ' %');

function figureText(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, 'e');
  return size >= 1000 ? whole(value) : String(Number(value.toPrecision(4)));
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
const roleVariable = (role) => (/^\d+$/.test(role) ? 's' + (Number(role) % 8) : role === 'plain' ? 'soft' : role);

const tip = byId('tip');
function showTip(x, y, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(innerWidth - box.width - 4, x + 14)) + 'px';
  tip.style.top = Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18) + 'px';
}
const hideTip = () => { tip.hidden = true; };
const tipLine = (name, value) => make('div', { class: 'line' }, make('span', {}, shown(name)), make('span', {}, value));

const redraws = [];
const redraw = () => redraws.forEach((again) => again());
const wantsDark = matchMedia('(prefers-color-scheme: dark)');
const theme = byId('theme');
const isDark = () => (document.documentElement.dataset.theme || (wantsDark.matches ? 'dark' : 'light')) === 'dark';
function nameTheme() {
  theme.textContent = isDark() ? 'Light' : 'Dark';
  theme.setAttribute('aria-label', isDark() ? 'Use light colours' : 'Use dark colours');
}
theme.hidden = false;
theme.addEventListener('click', () => {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  nameTheme();
  redraw();
});
wantsDark.addEventListener('change', () => { nameTheme(); redraw(); });
nameTheme();
let lastWidth = innerWidth;
addEventListener('resize', () => {
  if (innerWidth !== lastWidth) { lastWidth = innerWidth; requestAnimationFrame(redraw); }
});
