// Draws the charts of charts.py at the width of the page, so that text keeps its size on a phone.
const HEIGHT = 270, NARROW = 480;

function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(10)));
  return found;
}

const textWidth = (() => {
  const context = document.createElement('canvas').getContext('2d');
  return (text) => { context.font = '12px system-ui, sans-serif'; return context.measureText(text).width; };
})();

function shortened(text, width) {
  text = shown(text);
  if (textWidth(text) <= width) return text;
  let low = 0, high = text.length;
  while (low < high) { const middle = (low + high + 1) >> 1; if (textWidth(text.slice(0, middle) + '…') <= width) low = middle; else high = middle - 1; }
  return text.slice(0, low) + '…';
}

function keys(place, entries, dot) {
  if (entries.length < 2) return;
  place.append(make('ul', { class: 'keys', 'aria-hidden': 'true' }, ...entries.map((entry) => {
    const sign = make('i', dot ? { class: 'dot' } : entry.dashed ? { class: 'dashed' } : {});
    sign.style.color = `var(--${roleVariable(entry.role)})`;
    return make('li', {}, sign, shown(entry.name));
  })));
}

function frame(place, width, height) {
  const svg = draw('svg', { viewBox: `0 0 ${width} ${height}`, height, 'aria-hidden': 'true', focusable: 'false' });
  place.append(svg);
  return svg;
}

// Text of a value as its axis shows it.
const axisText = (axis, value) => (axis.percent && value !== null ? Number((100 * value).toPrecision(6)) + ' %' : figureText(value));

// Axes with gridlines. `x` and `y`: label, low, high, percent; each with its ticks.
function plot(place, x, y, height, top) {
  const width = place.clientWidth, texts = y.ticks.map((value) => axisText(y, value));
  const box = { left: Math.max(...texts.map(textWidth)) + 12, right: width - 14, top, bottom: height - 44 };
  const toX = (value) => box.left + (value - x.low) / (x.high - x.low) * (box.right - box.left);
  const toY = (value) => box.bottom - (value - y.low) / (y.high - y.low) * (box.bottom - box.top);
  const svg = frame(place, width, height);
  svg.append(draw('text', { x: 0, y: 12 }, y.label));
  y.ticks.forEach((value, i) => svg.append(
    draw('line', { class: value === y.low ? 'axis' : 'gridline', x1: box.left, x2: box.right, y1: toY(value), y2: toY(value) }),
    draw('text', { x: box.left - 8, y: toY(value) + 4, 'text-anchor': 'end' }, texts[i])));
  for (const value of x.ticks) svg.append(draw('text', { x: toX(value), y: box.bottom + 18, 'text-anchor': value === x.high ? 'end' : 'middle' }, axisText(x, value)));
  svg.append(draw('text', { x: (box.left + box.right) / 2, y: height - 4, 'text-anchor': 'middle' }, x.label));
  return { svg, box, toX, toY };
}

// The axis with its ends set; values that are not fixed come from the data.
function fitted(axis, values, most, round) {
  let low = axis.low === null ? Math.min(...values) : axis.low, high = axis.high === null ? Math.max(...values) : axis.high;
  if (!(high > low)) high = low + (Math.abs(low) || 1);
  const found = ticks(low, high, most), step = found.length > 1 ? found[1] - found[0] : high - low;
  if (round && axis.high === null && found[found.length - 1] < high - step * 0.05) found.push(Number((found[found.length - 1] + step).toPrecision(10)));
  return { ...axis, low, high: round && axis.high === null ? Math.max(high, found[found.length - 1]) : high, ticks: found };
}

function drawLines(place, figure) {
  keys(place, figure.lines);
  const xs = figure.lines.flatMap((line) => line.xs), first = Math.min(...xs);
  const zero = figure.x.low === null && first > 0 && first <= 20 && Math.max(...xs) > 10 * first; // a first step of 10 is drawn from 0
  const xAxis = fitted(zero ? { ...figure.x, low: 0 } : figure.x, xs, Math.max(2, Math.floor(place.clientWidth / 90)), false);
  const yAxis = fitted(figure.y, figure.lines.flatMap((line) => line.ys), 5, true);
  const { svg, box, toX, toY } = plot(place, xAxis, yAxis, HEIGHT, figure.marks.length ? 36 : 26);
  for (const mark of figure.marks) {
    const at = toX(mark.x), toLeft = at + textWidth(mark.label) + 8 > place.clientWidth;
    svg.append(draw('line', { class: 'mark', x1: at, x2: at, y1: box.top - 8, y2: box.bottom }));
    svg.append(draw('text', { x: at + (toLeft ? -5 : 5), y: box.top - 5, 'text-anchor': toLeft ? 'end' : 'start' }, mark.label));
  }
  const cross = draw('line', { class: 'cross', y1: box.top, y2: box.bottom, visibility: 'hidden' });
  svg.append(cross);
  for (const line of [...figure.lines].reverse()) { // the first lies on top
    const path = line.xs.map((value, i) => `${toX(value).toFixed(1)} ${toY(line.ys[i]).toFixed(1)}`).join('L');
    const stroke = draw('path', { d: 'M' + path, fill: 'none', 'stroke-width': line === figure.lines[0] ? 2.1 : 1.5, 'stroke-linejoin': 'round', 'stroke-linecap': 'round' });
    stroke.style.stroke = `var(--${roleVariable(line.role)})`;
    if (line.dashed) stroke.setAttribute('stroke-dasharray', '5 4');
    svg.append(stroke);
  }
  const longest = figure.lines.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
  const nearest = (line, at) => line.xs.reduce((best, value, i) => (Math.abs(value - at) < Math.abs(line.xs[best] - at) ? i : best), 0);
  svg.addEventListener('pointermove', (event) => {
    const share = (event.clientX - svg.getBoundingClientRect().left - box.left) / (box.right - box.left);
    const at = longest.xs[nearest(longest, xAxis.low + share * (xAxis.high - xAxis.low))];
    const lines = figure.lines.flatMap((line) => {
      const i = nearest(line, at);
      return Math.abs(line.xs[i] - at) > (xAxis.high - xAxis.low) / 40 ? [] : [tipLine(line.name, axisText(figure.y, line.ys[i]))];
    });
    for (const [name, value] of Object.entries({ visibility: 'visible', x1: toX(at), x2: toX(at) })) cross.setAttribute(name, value);
    showTip(event.clientX, event.clientY, tipLine(figure.x.label, axisText(figure.x, at)), ...lines);
  });
  svg.addEventListener('pointerleave', () => { cross.setAttribute('visibility', 'hidden'); hideTip(); });
}

function drawBars(place, figure) {
  keys(place, figure.series, figure.dots);
  const many = figure.series.length, thickness = figure.dots ? 26 : Math.max(28, many * 13 + 12);
  const widest = Math.max(...figure.labels.map((label) => textWidth(shown(label))));
  const room = place.clientWidth, most = Math.min(room * 0.42, 240);
  const above = widest > most && (room < NARROW || widest <= room) ? 17 : 0; // labels that do not fit beside the bars
  const row = thickness + above;
  const tall = figure.labels.length * row > 436;
  const head = tall ? 22 : 0; // room for a second axis: the one below is out of sight at first
  const height = head + figure.labels.length * row + 34;
  const scroller = make('div', { class: tall ? 'chart tall' : '' });
  if (tall) { scroller.tabIndex = 0; scroller.setAttribute('role', 'group'); scroller.setAttribute('aria-label', figure.title); }
  place.append(scroller);
  const width = scroller.clientWidth || place.clientWidth;
  const left = above ? 14 : Math.min(most, widest) + 12;
  const { low, high, decimals } = figure.x;
  const valueText = (value) => {
    if (value === null || figure.x.percent) return percent(value);
    return decimals !== null ? fixed(value, decimals) : figureText(Number(value.toPrecision(3)));
  };
  const widestValue = Math.max(...figure.series.flatMap((series) => series.values).map((value) => textWidth(valueText(value))));
  const right = Math.max(36, widestValue + 14); // a value stands right of the end of its bar, or of its point
  const x = (value) => left + (value - low) / (high - low) * (width - left - right);
  const svg = frame(scroller, width, height);
  const bottom = head + figure.labels.length * row + 4;
  for (const value of ticks(low, high, Math.max(2, Math.floor((width - left) / 80)))) {
    svg.append(draw('line', { class: value === 0 ? 'axis' : 'gridline', x1: x(value), x2: x(value), y1: head, y2: bottom }));
    if (tall) svg.append(draw('text', { x: x(value), y: head - 8, 'text-anchor': 'middle' }, axisText(figure.x, value)));
    svg.append(draw('text', { x: x(value), y: bottom + 18, 'text-anchor': 'middle' }, axisText(figure.x, value)));
  }
  figure.labels.forEach((label, i) => {
    const middle = head + i * row + above + thickness / 2 + 2;
    const beside = { class: 'strong', x: left - 10, y: middle + 4, 'text-anchor': 'end' };
    svg.append(draw('text', above ? { class: 'strong over', x: 0, y: head + i * row + 15 } : beside, shortened(label, above ? width : left - 12)));
    const values = figure.series.map((series) => series.values[i]);
    if (figure.dots) {
      const known = values.filter((value) => value !== null);
      if (known.length > 1) svg.append(draw('line', { class: 'axis', 'stroke-width': 2, x1: x(Math.min(...known)), x2: x(Math.max(...known)), y1: middle, y2: middle }));
    }
    figure.series.forEach((series, j) => {
      const value = series.values[i];
      if (value === null) return;
      let shape;
      if (figure.dots) shape = draw('circle', { class: j < many - 1 ? 'ring' : '', cx: x(value), cy: middle, r: 4.2 + 2.2 * (many - 1 - j) }); // equal values: rings around a dot
      else {
        const thick = Math.min(14, (thickness - 10) / many);
        const top = middle - thick * many / 2 + j * thick;
        shape = draw('rect', { x: Math.min(x(0), x(value)), y: top + 0.5, width: Math.max(1, Math.abs(x(value) - x(0))), height: thick - 1, rx: 2 });
        svg.append(draw('text', { x: Math.max(x(value), x(0)) + 6, y: top + thick / 2 + 4 }, valueText(value)));
      }
      const ring = shape.classList.contains('ring');
      shape.style[ring ? 'stroke' : 'fill'] = `var(--${roleVariable(series.role)})`;
      svg.append(shape);
    });
    if (figure.dots) {
      const last = values[many - 1]; // its number has the colour of its point
      if (last !== null && many < 3) {
        const text = draw('text', { x: width, y: middle + 4, 'text-anchor': 'end' }, valueText(last));
        text.style.fill = `var(--${roleVariable(figure.series[many - 1].role)})`;
        svg.append(text);
      }
    }
    const area = draw('rect', { x: 0, y: head + i * row + 2, width, height: row, fill: 'transparent' });
    area.addEventListener('pointermove', (event) => showTip(event.clientX, event.clientY, make('b', {}, shown(label)),
      ...figure.series.map((series) => tipLine(series.name, valueText(series.values[i])))));
    area.addEventListener('pointerleave', hideTip);
    svg.append(area);
  });
}

function drawMatrix(place, figure) {
  const count = figure.labels.length, room = place.clientWidth;
  const longest = Math.max(...figure.labels.map((label) => textWidth(shown(label))));
  const space = Math.min(longest, 120, room * 0.28) + 10; // for labels beside the rows
  const named = count <= 40 && room - space - 2 >= 8 * count;
  const margin = named ? space : 2;
  const side = Math.max(1, Math.min(room - margin - 2, 640)) / count;
  const width = Math.max(margin + side * count + 2, Math.min(room, 150));
  const short = named && longest <= side - 2;
  const top = named ? (short ? 34 : Math.min(longest, 96) + 26) : 22;
  const height = top + side * count + 4;
  const svg = frame(place, width, height);
  svg.style.maxWidth = width + 'px';
  svg.style.margin = '0 auto';
  svg.append(draw('text', { x: 0, y: 11 }, 'true ↓   predicted →'));
  const levels = new Map();
  for (const [i, j, images] of figure.cells) {
    const share = images / figure.totals[i];
    const level = (i === j ? 'a' : 'b') + Math.max(1, Math.round(share * 12));
    levels.set(level, (levels.get(level) || '') + `M${(margin + j * side).toFixed(2)} ${(top + i * side).toFixed(2)}h${side.toFixed(2)}v${side.toFixed(2)}h${(-side).toFixed(2)}z`);
  }
  svg.append(draw('rect', { x: margin, y: top, width: side * count, height: side * count, fill: 'none', class: 'gridline' }));
  for (const [level, path] of levels) {
    const cell = draw('path', { d: path });
    cell.style.fill = `rgba(var(--heat${level[0] === 'a' ? '' : '-bad'}), ${(0.08 + 0.92 * Number(level.slice(1)) / 12).toFixed(2)})`;
    svg.append(cell);
  }
  if (side >= 22) {
    for (const [i, j, images] of figure.cells) {
      const share = images / figure.totals[i];
      const text = draw('text', { x: margin + (j + 0.5) * side, y: top + (i + 0.5) * side + 4, 'text-anchor': 'middle' }, String(images));
      text.style.fill = share > 0.55 ? 'var(--card)' : 'var(--ink)';
      if (textWidth(String(images)) > side - 3) text.style.fontSize = '9px';
      svg.append(text);
    }
  }
  if (named) figure.labels.forEach((label, i) => {
    const size = `${Math.min(12, side - 1)}px`;
    const rowText = draw('text', { x: margin - 7, y: top + (i + 0.5) * side + Math.min(4, side / 3), 'text-anchor': 'end' }, shortened(label, margin - 10));
    rowText.style.fontSize = size;
    svg.append(rowText);
    const column = { x: 0, y: 0, 'text-anchor': short ? 'middle' : 'start', transform: `translate(${margin + (i + 0.5) * side + (short ? 0 : 4)} ${top - 7})${short ? '' : ' rotate(-90)'}` };
    const columnText = draw('text', column, shortened(label, short ? side : 96));
    columnText.style.fontSize = size;
    svg.append(columnText);
  });
  const area = draw('rect', { x: margin, y: top, width: side * count, height: side * count, fill: 'transparent' });
  const counts = new Map(figure.cells.map(([i, j, images]) => [i * count + j, images]));
  area.addEventListener('pointermove', (event) => {
    const bounds = svg.getBoundingClientRect(), scale = width / bounds.width;
    const j = Math.floor(((event.clientX - bounds.left) * scale - margin) / side), i = Math.floor(((event.clientY - bounds.top) * scale - top) / side);
    if (i < 0 || j < 0 || i >= count || j >= count) return hideTip();
    const images = counts.get(i * count + j) || 0;
    showTip(event.clientX, event.clientY, tipLine('true', shown(figure.labels[i]).slice(0, 60)), tipLine('predicted', shown(figure.labels[j]).slice(0, 60)),
      tipLine('images', `${whole(images)} of ${whole(figure.totals[i])}`));
  });
  area.addEventListener('pointerleave', hideTip);
  svg.append(area);
}

function drawReliability(place, figure) {
  const axis = (label, most) => ({ label, percent: true, low: 0, high: 1, ticks: ticks(0, 1, most) });
  const { svg, toX, toY } = plot(place, axis('largest probability', place.clientWidth < 400 ? 4 : 5), axis('accuracy', 5), HEIGHT + 24, 26);
  const all = figure.bins.reduce((sum, bin) => sum + bin.images, 0);
  for (const bin of figure.bins) {
    const x = toX(bin.low) + 1.5, width = Math.max(1, toX(bin.high) - toX(bin.low) - 3), bottom = toY(0);
    const bar = draw('rect', { x, width, y: toY(bin.accuracy), height: Math.max(1, bottom - toY(bin.accuracy)), rx: 2 });
    bar.style.fill = 'var(--source)';
    bar.style.opacity = (0.3 + 0.7 * Math.sqrt(bin.images / all)).toFixed(2);
    const area = draw('rect', { x, width, y: toY(1), height: bottom - toY(1), fill: 'transparent' });
    area.addEventListener('pointermove', (event) => showTip(event.clientX, event.clientY, tipLine('images', whole(bin.images)), tipLine('mean probability', percent(bin.confidence)), tipLine('accuracy', percent(bin.accuracy))));
    area.addEventListener('pointerleave', hideTip);
    svg.append(bar, area);
  }
  svg.append(draw('line', { class: 'mark', x1: toX(0), y1: toY(0), x2: toX(1), y2: toY(1), 'pointer-events': 'none' }));
}

const DRAWERS = { lines: drawLines, bars: drawBars, matrix: drawMatrix, reliability: drawReliability };

for (const figure of data.figures) {
  const place = document.querySelector(`[data-figure="${figure.id}"]`);
  if (!place) continue;
  const again = () => { place.replaceChildren(); DRAWERS[figure.kind](place, figure); };
  again();
  redraws.push(again);
}
