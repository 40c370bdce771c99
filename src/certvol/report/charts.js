// Draws the figures that figures.py describes, at the width they have: text keeps its size on a phone.
const HEIGHT = 270, NARROW = 480;

function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(10)));
  return found;
}

const axisText = (value, isPercent) => (isPercent ? Number((100 * value).toPrecision(6)) + ' %' : figureText(value));
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

function drawLines(place, figure) {
  keys(place, figure.lines);
  const width = place.clientWidth, height = HEIGHT;
  const ys = figure.lines.flatMap((line) => line.ys.filter((y) => y !== null));
  const xs = figure.lines.flatMap((line) => [line.xs[0], line.xs[line.xs.length - 1]]);
  let low = figure.low !== null ? figure.low : Math.min(...ys), high = figure.high !== null ? figure.high : Math.max(...ys);
  if (!(high > low)) { high = low + (Math.abs(low) || 1); }
  const yTicks = ticks(low, high, 5);
  if (figure.high === null) {
    const step = yTicks.length > 1 ? yTicks[1] - yTicks[0] : high - low;
    if (yTicks[yTicks.length - 1] < high - step * 0.05) yTicks.push(Number((yTicks[yTicks.length - 1] + step).toPrecision(10)));
    high = Math.max(high, yTicks[yTicks.length - 1]);
  }
  let left = figure.x_percent ? 0 : Math.min(...xs), right = figure.x_percent ? 1 : Math.max(...xs);
  if (left <= 20 && left > 0 && right > 10 * left) left = 0;
  if (!(right > left)) right = left + 1;
  const labels = yTicks.map((y) => axisText(y, figure.y_percent));
  const box = { left: Math.max(...labels.map(textWidth)) + 12, right: 14, top: figure.marks.length ? 36 : 26, bottom: 44 };
  const x = (value) => box.left + (value - left) / (right - left) * (width - box.left - box.right);
  const y = (value) => height - box.bottom - (value - low) / (high - low) * (height - box.top - box.bottom);
  const svg = frame(place, width, height);
  svg.append(draw('text', { x: 0, y: 12 }, figure.y_label));
  yTicks.forEach((value, i) => {
    svg.append(draw('line', { class: value === low ? 'axis' : 'gridline', x1: box.left, x2: width - box.right, y1: y(value), y2: y(value) }));
    svg.append(draw('text', { x: box.left - 8, y: y(value) + 4, 'text-anchor': 'end' }, labels[i]));
  });
  for (const value of ticks(left, right, Math.max(2, Math.floor(width / 90)))) {
    svg.append(draw('text', { x: x(value), y: height - box.bottom + 18, 'text-anchor': value === right ? 'end' : 'middle' }, axisText(value, figure.x_percent)));
  }
  svg.append(draw('text', { x: (box.left + width - box.right) / 2, y: height - 4, 'text-anchor': 'middle' }, figure.x_label));
  for (const mark of figure.marks) {
    svg.append(draw('line', { class: 'mark', x1: x(mark.x), x2: x(mark.x), y1: box.top - 8, y2: height - box.bottom }));
    const toLeft = x(mark.x) + textWidth(mark.label) + 8 > width;
    svg.append(draw('text', { x: x(mark.x) + (toLeft ? -5 : 5), y: box.top - 2, 'text-anchor': toLeft ? 'end' : 'start' }, mark.label));
  }
  const cross = draw('line', { class: 'cross', y1: box.top, y2: height - box.bottom, visibility: 'hidden' });
  svg.append(cross);
  for (const line of [...figure.lines].reverse()) { // the first lies on top
    let path = '', pen = 'M';
    line.xs.forEach((value, i) => {
      if (line.ys[i] === null) { pen = 'M'; return; }
      path += `${pen}${x(value).toFixed(1)} ${y(Math.max(low, line.ys[i])).toFixed(1)}`;
      pen = 'L';
    });
    const stroke = draw('path', { d: path, fill: 'none', 'stroke-width': line === figure.lines[0] ? 2.1 : 1.5, 'stroke-linejoin': 'round', 'stroke-linecap': 'round' });
    stroke.style.stroke = `var(--${roleVariable(line.role)})`;
    if (line.dashed) stroke.setAttribute('stroke-dasharray', '5 4');
    svg.append(stroke);
  }
  svg.addEventListener('pointermove', (event) => {
    const bounds = svg.getBoundingClientRect();
    const at = left + ((event.clientX - bounds.left) * width / bounds.width - box.left) / (width - box.left - box.right) * (right - left);
    const near = (line) => line.xs.reduce((best, value, i) => (Math.abs(value - at) < Math.abs(line.xs[best] - at) ? i : best), 0);
    const longest = figure.lines.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
    const place = longest.xs[near(longest)];
    const gap = (right - left) / 40;
    const lines = figure.lines.flatMap((line) => {
      const i = near(line);
      return Math.abs(line.xs[i] - place) > gap ? [] : [tipLine(line.name, axisText(line.ys[i], figure.y_percent))];
    });
    cross.setAttribute('visibility', 'visible');
    cross.setAttribute('x1', x(place)); cross.setAttribute('x2', x(place));
    showTip(event.clientX, event.clientY, tipLine(figure.x_label, axisText(place, figure.x_percent)), ...lines);
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
  const valueText = (value) => {
    if (value === null || figure.percent) return percent(value);
    return figure.decimals !== null ? fixed(value, figure.decimals) : figureText(Number(value.toPrecision(3)));
  };
  const tipText = (value) => (value === null || figure.decimals !== null ? valueText(value) : axisText(Number(value.toPrecision(4)), figure.percent));
  const widestValue = Math.max(...figure.series.flatMap((series) => series.values).map((value) => textWidth(valueText(value))));
  const right = Math.max(36, widestValue + 14); // a value stands right of the end of its bar, or of its point
  const x = (value) => left + (value - figure.low) / (figure.high - figure.low) * (width - left - right);
  const svg = frame(scroller, width, height);
  const bottom = head + figure.labels.length * row + 4;
  for (const value of ticks(figure.low, figure.high, Math.max(2, Math.floor((width - left) / 80)))) {
    svg.append(draw('line', { class: value === 0 ? 'axis' : 'gridline', x1: x(value), x2: x(value), y1: head, y2: bottom }));
    if (tall) svg.append(draw('text', { x: x(value), y: head - 8, 'text-anchor': 'middle' }, axisText(value, figure.percent)));
    svg.append(draw('text', { x: x(value), y: bottom + 18, 'text-anchor': 'middle' }, axisText(value, figure.percent)));
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
      if (figure.dots) shape = draw('circle', { cx: x(value), cy: middle, r: 4.8 });
      else {
        const thick = Math.min(14, (thickness - 10) / many);
        const top = middle - thick * many / 2 + j * thick;
        shape = draw('rect', { x: Math.min(x(0), x(value)), y: top + 0.5, width: Math.max(1, Math.abs(x(value) - x(0))), height: thick - 1, rx: 2 });
        svg.append(draw('text', { x: Math.max(x(value), x(0)) + 6, y: top + thick / 2 + 4 }, valueText(value)));
      }
      shape.style.fill = `var(--${roleVariable(series.role)})`;
      svg.append(shape);
    });
    if (figure.dots) {
      const last = values[values.length - 1];
      if (last !== null && many < 3) svg.append(draw('text', { x: width, y: middle + 4, 'text-anchor': 'end' }, valueText(last)));
    }
    const area = draw('rect', { x: 0, y: head + i * row + 2, width, height: row, fill: 'transparent' });
    area.addEventListener('pointermove', (event) => showTip(event.clientX, event.clientY, make('b', {}, shown(label)),
      ...figure.series.map((series) => tipLine(series.name, tipText(series.values[i])))));
    area.addEventListener('pointerleave', hideTip);
    svg.append(area);
  });
}

function drawMatrix(place, figure) {
  const count = figure.labels.length, room = place.clientWidth;
  const longest = Math.max(...figure.labels.map((label) => textWidth(shown(label))));
  const named = count <= 40;
  const margin = named ? Math.min(longest, Math.min(120, room * 0.28)) + 10 : 2;
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
    const share = images / Math.max(1, figure.totals[i]);
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
      const share = images / Math.max(1, figure.totals[i]);
      const text = draw('text', { x: margin + (j + 0.5) * side, y: top + (i + 0.5) * side + 4, 'text-anchor': 'middle' }, String(images));
      text.style.fill = share > 0.55 ? 'var(--card)' : 'var(--ink)';
      if (textWidth(String(images)) > side - 3) text.style.fontSize = '9px';
      svg.append(text);
    }
  }
  if (named) figure.labels.forEach((label, i) => {
    if (side < 8) return;
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
  const width = place.clientWidth, height = HEIGHT + 24;
  const box = { left: 48, right: 14, top: 26, bottom: 44 };
  const x = (value) => box.left + value * (width - box.left - box.right);
  const y = (value) => height - box.bottom - value * (height - box.top - box.bottom);
  const svg = frame(place, width, height);
  const all = figure.bins.reduce((sum, bin) => sum + bin.images, 0);
  svg.append(draw('text', { x: 0, y: 12 }, 'accuracy'));
  for (const value of ticks(0, 1, width < 400 ? 4 : 5)) {
    svg.append(draw('line', { class: value === 0 ? 'axis' : 'gridline', x1: box.left, x2: width - box.right, y1: y(value), y2: y(value) }));
    svg.append(draw('text', { x: box.left - 8, y: y(value) + 4, 'text-anchor': 'end' }, axisText(value, true)));
    svg.append(draw('text', { x: x(value), y: height - box.bottom + 18, 'text-anchor': value === 1 ? 'end' : 'middle' }, axisText(value, true)));
  }
  svg.append(draw('text', { x: (box.left + width - box.right) / 2, y: height - 4, 'text-anchor': 'middle' }, 'largest probability'));
  for (const bin of figure.bins) {
    if (!bin.images) continue;
    const left = x(bin.low) + 1.5, wide = Math.max(1, x(bin.high) - x(bin.low) - 3);
    const bar = draw('rect', { x: left, width: wide, y: y(bin.accuracy), height: Math.max(1, y(0) - y(bin.accuracy)), rx: 2 });
    bar.style.fill = 'var(--source)';
    bar.style.opacity = (0.3 + 0.7 * Math.sqrt(bin.images / all)).toFixed(2);
    const area = draw('rect', { x: left, width: wide, y: y(1), height: y(0) - y(1), fill: 'transparent' });
    area.addEventListener('pointermove', (event) => showTip(event.clientX, event.clientY, tipLine('images', whole(bin.images)), tipLine('mean probability', percent(bin.confidence)), tipLine('accuracy', percent(bin.accuracy))));
    area.addEventListener('pointerleave', hideTip);
    svg.append(bar, area);
  }
  svg.append(draw('line', { class: 'mark', x1: x(0), y1: y(0), x2: x(1), y2: y(1), 'pointer-events': 'none' }));
}

const DRAWERS = { lines: drawLines, bars: drawBars, matrix: drawMatrix, reliability: drawReliability };

for (const figure of data.figures) {
  const place = document.querySelector(`[data-figure="${figure.id}"]`);
  if (!place) continue;
  const again = () => { place.replaceChildren(); DRAWERS[figure.kind](place, figure); };
  again();
  redraws.push(again);
}
