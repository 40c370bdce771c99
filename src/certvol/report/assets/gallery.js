// The gallery: threshold, filters, download. Image i is the i-th most certain of the run; another measure gives another order.
if (gallery) {
  const count = gallery.paths.length;
  const truth = gallery.truth;
  const grid = byId('grid'), rows = byId('rows');
  const ITEM = { width: 92, height: 124, frame: 80 };
  const STRIP = 20, THUMB = 16;
  const NONE = 'No image matches these filters.';
  const right = truth && gallery.predicted.map((label, i) => label === truth[i]);
  const className = (label) => shown(gallery.classes[label]);
  const state = { measure: null, threshold: 0, order: [], certainty: [], view: [], active: 0 };

  for (const [i, measure] of gallery.measures.entries()) byId('measure').append(make('option', { value: i }, measure.title));
  byId('measure').value = gallery.measures.findIndex((measure) => measure.name === gallery.certainty);
  const used = (labels) => [...new Set(labels)].sort((a, b) => a - b);
  const fillClasses = (select, labels) => used(labels).forEach((label) => select.append(make('option', { value: label }, className(label))));
  fillClasses(byId('predicted'), gallery.predicted);
  if (truth) fillClasses(byId('true'), truth);

  // The highest certainty that at least this share of the images reach, as for `certvol predict --coverage`.
  function thresholdAt(share) {
    const first = Math.min(count, Math.max(1, Math.ceil(share * count - 1e-9)));
    return state.certainty[state.order[first - 1]];
  }
  const accepted = (image) => state.certainty[image] >= state.threshold;
  const ownUnits = (certainty) => certainty * state.measure.sign;

  function chooseMeasure() {
    state.measure = gallery.measures[Number(byId('measure').value)];
    state.certainty = state.measure.values.map((value) => value * state.measure.sign);
    state.order = state.certainty.map((_, i) => i).sort((a, b) => state.certainty[b] - state.certainty[a] || a - b);
    slide();
  }

  function slide() {
    const share = Number((byId('coverage').value / 100).toFixed(4));
    state.threshold = thresholdAt(share);
    byId('threshold').value = String(ownUnits(state.threshold));
    byId('command').textContent = `certvol predict ${shellWord(gallery.run)} NEW_IMAGES --out new.csv --coverage ${share}${byMeasure()}`;
    update(share);
  }

  function typed() {
    const value = Number(byId('threshold').value.trim().replace(',', '.'));
    const bad = byId('threshold').value.trim() === '' || !Number.isFinite(value);
    byId('threshold').setAttribute('aria-invalid', String(bad));
    if (bad) return;
    state.threshold = value * state.measure.sign;
    const reached = state.certainty.filter((certainty) => certainty >= state.threshold).length;
    byId('coverage').value = 100 * reached / count;
    byId('command').textContent = `certvol predict ${shellWord(gallery.run)} NEW_IMAGES --out new.csv --min-certainty ${value}${byMeasure()}`;
    update(reached / count);
  }

  const byMeasure = () => (state.measure.name === gallery.certainty ? '' : ` --measure ${state.measure.name}`);
  const shellWord = (text) => (/^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

  // `share`: the requested one. More is accepted if images are few or equally certain.
  function update(share) {
    let taken = 0, rightTaken = 0, rightAll = 0;
    for (let i = 0; i < count; i++) {
      const take = accepted(i);
      taken += take;
      if (right) { rightAll += right[i]; rightTaken += take && right[i]; }
    }
    const left = count - taken;
    byId('coverage-shown').textContent = percent(share);
    byId('coverage').setAttribute('aria-valuetext', `${percent(share)}, ${whole(taken)} of ${whole(count)} images accepted`);
    byId('accepted').textContent = whole(taken);
    byId('accepted-hint').textContent = `of ${whole(count)} images, ${percent(taken / count).replace(' ', '\u00a0')}`;
    byId('rejected').textContent = whole(left);
    let words = `${whole(taken)} of ${whole(count)} images accepted`;
    if (right) {
      byId('accepted-accuracy').textContent = percent(taken ? rightTaken / taken : null);
      byId('rejected-accuracy').textContent = percent(left ? (rightAll - rightTaken) / left : null);
      byId('all-accuracy').textContent = percent(rightAll / count);
      words += `, ${percent(taken ? rightTaken / taken : null)} of them right`;
    }
    say(words);
    drawHistogram();
    filter();
  }

  let saying = 0;
  function say(words) {
    clearTimeout(saying);
    saying = setTimeout(() => { byId('live').textContent = words; }, 400);
  }

  function filter() {
    const predicted = Number(byId('predicted').value);
    const wanted = truth ? Number(byId('true').value) : -1;
    const rightness = truth ? byId('right').value : '';
    const which = byId('state').value;
    const kept = state.order.filter((i) => (predicted < 0 || gallery.predicted[i] === predicted) && (wanted < 0 || truth[i] === wanted)
      && (!rightness || right[i] === (rightness === 'right')) && (!which || accepted(i) === (which === 'accepted')));
    const half = Math.ceil(kept.length / 2); // so that no image is in both strips
    strip('top', kept.slice(0, Math.min(STRIP, half)), NONE);
    strip('bottom', kept.slice(half).slice(-STRIP).reverse(), kept.length ? 'There are no more images.' : NONE);
    state.view = byId('order').value === 'up' ? kept.reverse() : kept;
    state.active = 0;
    byId('shown-count').textContent = `${whole(kept.length)} image${kept.length === 1 ? '' : 's'}`;
    byId('download').disabled = kept.length === 0;
    layOut();
  }

  function describe(i) {
    const parts = [`predicted ${className(gallery.predicted[i])}`];
    if (truth) parts.push(right[i] ? 'right' : `wrong, true class ${className(truth[i])}`);
    parts.push(`${state.measure.title} ${figureText(state.measure.values[i])}`, accepted(i) ? 'accepted' : 'not accepted', shown(gallery.paths[i]));
    return parts.join(', ');
  }

  function item(i, place, size) {
    const button = make('button', { type: 'button', class: 'picture', 'aria-label': describe(i), tabindex: '-1' }, pictureFrame(i, ITEM.frame),
      make('span', { class: 'name' }, className(gallery.predicted[i])), make('span', { class: 'value' }, valueText(state.measure.values[i])));
    if (truth && !right[i]) button.classList.add('wrong');
    if (!accepted(i)) button.classList.add('rejected');
    button.title = shown(gallery.paths[i]).slice(-200);
    button.dataset.image = i;
    return make('div', { class: 'item', role: 'listitem', 'aria-posinset': place + 1, 'aria-setsize': size }, button);
  }

  const valueText = (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 1000 ? value.toPrecision(4) : figureText(value));

  function strip(id, images, otherwise) {
    byId(id + '-count').textContent = images.length ? `${images.length} image${images.length === 1 ? '' : 's'}` : '';
    byId(id).replaceChildren(...(images.length ? images.map((i, place) => item(i, place, images.length)) : [make('p', { class: 'empty' }, otherwise)]));
    const first = byId(id).querySelector('button');
    if (first) first.tabIndex = 0;
  }

  // The page holds only the rows in sight.
  let columns = 1, indent = 0, drawn = '';
  function arrange() {
    columns = Math.max(1, Math.floor((grid.clientWidth - 16) / ITEM.width));
    indent = Math.max(0, (rows.clientWidth - columns * ITEM.width) / 2);
    rows.style.height = Math.max(1, Math.ceil(state.view.length / columns)) * ITEM.height + 16 + 'px';
  }

  function layOut() {
    arrange();
    arrange(); // again: a scrollbar may have appeared and made it narrower
    drawn = '';
    if (grid.scrollTop > rows.clientHeight) grid.scrollTop = 0;
    drawRows();
  }

  function drawRows() {
    const first = Math.max(0, Math.floor(grid.scrollTop / ITEM.height) - 1);
    const last = Math.ceil((grid.scrollTop + grid.clientHeight) / ITEM.height) + 1;
    const key = `${first} ${last} ${columns}`;
    if (key === drawn) return;
    drawn = key;
    const focused = rows.contains(document.activeElement);
    const made = [];
    for (let place = first * columns; place < Math.min(state.view.length, last * columns); place++) {
      const element = item(state.view[place], place, state.view.length);
      element.style.top = Math.floor(place / columns) * ITEM.height + 8 + 'px';
      element.style.left = (place % columns) * ITEM.width + indent + 'px';
      element.firstChild.dataset.place = place;
      made.push(element);
    }
    if (!state.view.length) made.push(make('p', { class: 'empty' }, NONE));
    rows.replaceChildren(...made);
    const active = rows.querySelector(`[data-place="${state.active}"]`) || rows.querySelector('button');
    if (active) { active.tabIndex = 0; if (focused) active.focus({ preventScroll: true }); }
  }

  function moveTo(place) {
    state.active = Math.max(0, Math.min(state.view.length - 1, place));
    const top = Math.floor(state.active / columns) * ITEM.height;
    if (top < grid.scrollTop) grid.scrollTop = top;
    if (top + ITEM.height + 8 > grid.scrollTop + grid.clientHeight) grid.scrollTop = top + ITEM.height + 16 - grid.clientHeight;
    drawn = '';
    drawRows();
    const active = rows.querySelector(`[data-place="${state.active}"]`);
    if (active) active.focus({ preventScroll: true });
  }

  rows.addEventListener('keydown', (event) => {
    const page = Math.max(1, Math.floor(grid.clientHeight / ITEM.height)) * columns;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    moveTo(state.active + steps[event.key]);
  });
  for (const id of ['top', 'bottom']) byId(id).addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const buttons = [...byId(id).querySelectorAll('button')];
    const next = step && buttons[buttons.indexOf(document.activeElement) + step];
    if (next) { event.preventDefault(); document.activeElement.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  });
  rows.addEventListener('focusin', (event) => {
    if (event.target.dataset.place === undefined) return;
    state.active = Number(event.target.dataset.place);
    rows.querySelectorAll('button[tabindex="0"]').forEach((button) => { button.tabIndex = -1; });
    event.target.tabIndex = 0;
  });
  grid.addEventListener('scroll', () => requestAnimationFrame(drawRows), { passive: true });

  byId('gallery-panel').addEventListener('click', (event) => {
    const button = event.target.closest('button.picture');
    if (!button) return;
    const i = Number(button.dataset.image);
    byId('picture-image').replaceChildren(pictureFrame(i, 256, describe(i)));
    byId('picture-name').textContent = shown(gallery.paths[i]);
    const facts = [['predicted', className(gallery.predicted[i])]];
    if (truth) facts.push(['true class', className(truth[i])]);
    facts.push(...gallery.measures.map((measure) => [measure.title, figureText(measure.values[i])]), ['accepted', accepted(i) ? 'yes' : 'no']);
    byId('picture-facts').replaceChildren(...facts.flatMap(([name, value]) => [make('dt', {}, name), make('dd', {}, value)]));
    byId('picture').showModal();
  });
  byId('picture').addEventListener('click', (event) => { if (event.target === byId('picture')) byId('picture').close(); });

  function drawHistogram() {
    const canvas = byId('histogram'), width = canvas.clientWidth, height = 44, ratio = devicePixelRatio || 1;
    if (!width) return;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const pen = canvas.getContext('2d');
    pen.scale(ratio, ratio);
    const low = state.certainty[state.order[count - 1]], high = state.certainty[state.order[0]];
    const span = high - low || 1, taken = state.order.filter(accepted).length;
    // The slider's axis: a share of the images, and half a thumb left free at either end.
    const slider = byId('coverage'), first = Number(slider.min) / 100;
    const at = (share) => THUMB / 2 + (width - THUMB) * Math.max(0, share - first) / (1 - first);
    for (const [from, to, name] of [[0, taken, 'accent'], [taken, count, 'faint']]) {
      pen.fillStyle = colour(name);
      for (let x = at(from / count); x < at(to / count); x++) {
        const rank = Math.min(count - 1, Math.max(0, Math.floor((first + (x - THUMB / 2) / (width - THUMB) * (1 - first)) * count)));
        const tall = 3 + (height - 3) * (state.certainty[state.order[rank]] - low) / span;
        pen.fillRect(x, height - tall, Math.min(1, at(to / count) - x), tall);
      }
    }
    byId('histogram-measure').textContent = state.measure.title + (state.measure.sign < 0 ? ' (tall where it is small)' : '');
  }

  // CSV as runs/tables.py writes it: no formulas, and bytes that are not UTF-8 as \xe9.
  const FORMULA = /^[=+\-@\t\r]/;
  const cell = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const escaped = (byte) => '\\x' + (byte.charCodeAt(0) & 0xff).toString(16);
  function nameCell(name, mark) {
    const text = name.replace(/[\udc80-\udcff]/gu, escaped);
    return cell(FORMULA.test(text) ? mark + text : text);
  }
  const pathCell = (path) => nameCell(path, './');
  const labelCell = (label) => nameCell(gallery.classes[label], "'");
  function csv() {
    const head = ['path', 'label', ...(truth ? ['truth'] : []), ...gallery.measures.map((measure) => measure.name), 'accepted'];
    const lines = state.view.map((i) => [pathCell(gallery.paths[i]), labelCell(gallery.predicted[i]), ...(truth ? [labelCell(truth[i])] : []),
      ...gallery.measures.map((measure) => String(measure.values[i])), String(accepted(i))].join(','));
    return [head.join(','), ...lines].join('\n') + '\n';
  }
  byId('download').addEventListener('click', () => {
    const address = URL.createObjectURL(new Blob([csv()], { type: 'text/csv;charset=utf-8' }));
    const link = make('a', { href: address, download: 'selection.csv' });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  });

  byId('coverage').addEventListener('input', slide);
  byId('threshold').addEventListener('change', typed);
  byId('measure').addEventListener('change', chooseMeasure);
  for (const id of ['predicted', 'true', 'right', 'state', 'order']) if (byId(id)) byId(id).addEventListener('change', () => { grid.scrollTop = 0; filter(); });
  chooseMeasure();
  redraws.push(() => { drawHistogram(); layOut(); });
}
