// t-SNE of the target's features, before and after adaptation: a point is the same image on both sides.
if (data.embedding && gallery) {
  const points = data.embedding;
  const sides = [...document.querySelectorAll('.scatter')];
  const values = gallery.measures.find((measure) => measure.name === gallery.certainty).values;
  const ofPoints = points.images.map((image) => values[image]);
  const sorted = [...ofPoints].sort((a, b) => a - b);
  const low = sorted[Math.floor(sorted.length * 0.02)], high = sorted[Math.ceil(sorted.length * 0.98) - 1];
  const byCertainty = points.images.map((_, i) => i).sort((a, b) => ofPoints[b] - ofPoints[a]);
  let current = -1;

  const labelColour = (label) => `hsl(${(label * 137.508 + 20) % 360} ${isDark() ? 62 : 58}% ${[isDark() ? 64 : 46, isDark() ? 74 : 36, isDark() ? 54 : 58][label % 3]}%)`;
  const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  function rampColour(share) {
    const at = Math.max(0, Math.min(0.9999, share)) * (RAMP.length - 1), i = Math.floor(at), rest = at - i;
    return `rgb(${RAMP[i].map((from, c) => Math.round(from + (RAMP[i + 1][c] - from) * rest)).join(' ')})`;
  }
  function pointColour(i) {
    const image = points.images[i], by = byId('colour').value;
    if (by === 'certainty') return rampColour((ofPoints[i] - low) / (high - low || 1));
    if (by === 'right') return gallery.predicted[image] === gallery.truth[image] ? colour('faint') : colour('bad');
    return labelColour((by === 'truth' ? gallery.truth : gallery.predicted)[image]);
  }

  const place = (canvas, [x, y]) => { const side = canvas.clientWidth; return [side / 2 + x * (side / 2 - 10), side / 2 - y * (side / 2 - 10)]; };
  function paint(canvas) {
    const side = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!side) return;
    canvas.width = canvas.height = side * ratio;
    const pen = canvas.getContext('2d');
    pen.scale(ratio, ratio);
    const laidOut = points[canvas.dataset.side];
    const radius = Math.max(2, Math.min(3.6, 60 / Math.sqrt(laidOut.length) + 1.2));
    const order = byId('colour').value === 'right' ? [...laidOut.keys()].sort((a, b) => wrong(a) - wrong(b)) : laidOut.keys();
    pen.globalAlpha = 0.85;
    for (const i of order) {
      const [x, y] = place(canvas, laidOut[i]);
      pen.fillStyle = pointColour(i);
      pen.beginPath();
      pen.arc(x, y, radius, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    if (current >= 0) {
      const [x, y] = place(canvas, laidOut[current]);
      pen.beginPath();
      pen.arc(x, y, 8, 0, 7);
      pen.lineWidth = 2.5;
      pen.strokeStyle = colour('ink');
      pen.stroke();
    }
  }
  const wrong = (i) => (gallery.truth[points.images[i]] === gallery.predicted[points.images[i]] ? 0 : 1);
  const paintAll = () => sides.forEach(paint);

  function facts(i) {
    const image = points.images[i];
    const found = [['predicted', shown(gallery.classes[gallery.predicted[image]])]];
    if (gallery.truth) found.push(['true class', shown(gallery.classes[gallery.truth[image]])]);
    found.push([gallery.certainty, figureText(ofPoints[i])]);
    return found;
  }
  function choose(i, x, y) {
    if (i !== current) { current = i; paintAll(); }
    if (i < 0) return hideTip();
    const image = points.images[i];
    showTip(x, y, pictureFrame(image, 112), make('b', {}, shown(gallery.paths[image]).slice(-60)), ...facts(i).map(([name, value]) => tipLine(name, value.slice(0, 60))));
  }

  for (const canvas of sides) {
    const laidOut = points[canvas.dataset.side];
    canvas.addEventListener('pointermove', (event) => {
      const bounds = canvas.getBoundingClientRect();
      let best = -1, nearest = 14 * 14;
      laidOut.forEach((point, i) => {
        const [x, y] = place(canvas, point);
        const away = (x - event.clientX + bounds.left) ** 2 + (y - event.clientY + bounds.top) ** 2;
        if (away < nearest) { nearest = away; best = i; }
      });
      choose(best, event.clientX, event.clientY);
    });
    canvas.addEventListener('pointerleave', () => choose(-1));
    canvas.addEventListener('blur', () => choose(-1));
    canvas.addEventListener('keydown', (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const now = byCertainty.indexOf(current);
      const next = byCertainty[current < 0 ? 0 : (now + step + byCertainty.length) % byCertainty.length];
      const bounds = canvas.getBoundingClientRect(), [x, y] = place(canvas, laidOut[next]);
      choose(next, bounds.left + x, bounds.top + y);
      byId('point-live').textContent = facts(next).map((pair) => pair.join(' ')).join(', ') + ', ' + shown(gallery.paths[points.images[next]]);
    });
  }

  function legend() {
    const by = byId('colour').value, entries = [];
    const entry = (fill, text) => { const dot = document.createElement('i'); dot.style.background = fill; entries.push(make('span', {}, dot, text)); };
    if (by === 'certainty') {
      const canvas = make('canvas', { width: 160, height: 10, 'aria-hidden': 'true' }), pen = canvas.getContext('2d');
      for (let x = 0; x < 160; x++) { pen.fillStyle = rampColour(x / 160); pen.fillRect(x, 0, 1, 10); }
      entries.push(make('span', {}, figureText(low)), canvas, make('span', {}, `${figureText(high)} (${gallery.certainty})`));
    } else if (by === 'right') {
      entry(colour('faint'), 'right');
      entry(colour('bad'), 'wrong');
    } else {
      const labels = [...new Set(points.images.map((image) => (by === 'truth' ? gallery.truth : gallery.predicted)[image]))].sort((a, b) => a - b);
      if (labels.length <= 40) labels.forEach((label) => entry(labelColour(label), shown(gallery.classes[label]).slice(0, 60)));
      else entries.push(make('span', {}, `${labels.length} classes, each with its own colour`));
    }
    byId('colour-legend').replaceChildren(...entries);
  }
  const again = () => { paintAll(); legend(); };
  byId('colour').addEventListener('change', again);
  again();
  redraws.push(again);
}
