/** One head's whole map: zoom, pan, walk it by keys, read every value; the row in focus shades the tokens. */

import {ARROWS, bitmap, button, colour, el, figure, keptChoice, quoted, ramp, ring, row, toggle, visible, within} from './draw.js';

const LARGEST_CELL = 52, CLOSER = 1 / 1.6;

/** @param {Box} root a card @param {Page} page */
export function makeMap(root, page, label = '') {
  /** @type {Subject | null} */
  let subject = null;
  /** @type {Tile | null} */
  let whole = null;
  /** @type {Tile | null} */
  let near = null;
  // In tokens; a view may begin and end between two.
  let view = {r0: 0, r1: 1, c0: 0, c1: 1};
  let T = 1, S = 1;
  /** @type {{r: number, c: number} | null} -1: all of them */
  let cell = null;
  let zoomTimer = 0, rowTimer = 0;
  const plot = {x: 0, y: 0, w: 1, h: 1};
  const toY = (r = 0) => plot.y + ((r - view.r0) / (view.r1 - view.r0)) * plot.h;
  const toX = (c = 0) => plot.x + ((c - view.c0) / (view.c1 - view.c0)) * plot.w;
  const toR = (y = 0) => view.r0 + ((y - plot.y) / plot.h) * (view.r1 - view.r0);
  const toC = (x = 0) => view.c0 + ((x - plot.x) / plot.w) * (view.c1 - view.c0);
  const middle = () => /** @type {const} */ ([(view.r0 + view.r1) / 2, (view.c0 + view.c1) / 2]);
  const scale = () => page.state.get('scale', 'sqrt');
  const isHard = () => page.state.get('hard', '1') === '1';
  const isPooled = () => whole !== null && whole.by[0] * whole.by[1] > 1;

  const HINT = 'Point at a cell to read its weight.';
  const readout = el('p', {class: 'readout', 'aria-live': 'polite'}, HINT);
  const drawn = figure(root, {
    label, draw, keys,
    height(width) {
      layout(width);
      return plot.y + plot.h + 4;
    },
    hover: pointed,
    leave: () => page.focus(null),
  });
  const bar = el('canvas', {class: 'ramp', width: 256, height: 1, role: 'img', 'aria-label': 'Colours from 0 to 1'});
  drawn.canvas.after(row(el('div', {class: 'scale'}, '0', bar, '1'), readout));
  const hardControl = toggle('Hard alignment', isHard(), (on) => page.state.set({hard: on ? 1 : 0}));
  drawn.controls.append(keptChoice(page.state, 'scale', 'sqrt', 'Scale', ['sqrt', 'linear', 'row max']), hardControl,
    el('div', {class: 'zooms'}, button('−', () => zoom(1 / CLOSER, ...middle()), 'quiet', 'Zoom out'), button('+', () => zoom(CLOSER, ...middle()), 'quiet', 'Zoom in'), button('Whole', reset, 'quiet', 'Show the whole map')));
  page.state.subscribe(['scale', 'hard'], () => {
    for (const tile of [whole, near]) if (tile) tile.picture = null;
    shadeFocus();
  }, root);
  page.onFocus(root, (place) => {
    if (!subject) return;
    if (!place) cell = null;
    else if (place.side === subject.rows && place.at < ahead()) cell = null;
    else if (place.side === subject.rows && cell?.r !== place.at - ahead()) cell = {r: place.at - ahead(), c: -1};
    else if (place.side === subject.cols && place.side !== subject.rows && cell?.c !== place.at) cell = {r: -1, c: place.at};
    shadeFocus();
  });

  /** @param {Edge} which @returns {string[]} */
  function names(which) {
    const tokens = (subject && page.given?.[subject[which]]?.tokens) || [];
    // A row of cross-attention belongs to the token that is written there: the one after the token that the decoder has read.
    return which === 'rows' && ahead() ? [...tokens.slice(1), 'next'] : tokens;
  }
  const ahead = () => (subject?.hard ? 1 : 0);
  /** @param {Edge} which @param {number} [by] */
  function name(which, from = 0, by = 1) {
    const tokens = names(which), last = Math.min(from + by, which === 'rows' ? T : S) - 1;
    return quoted(tokens[from] ?? String(from)) + (last > from ? `…${quoted(tokens[last] ?? '')}` : '');
  }
  function layout(width = 0) {
    const longest = (/** @type {Edge} */ which, from = 0, to = 0) => names(which).slice(Math.floor(from), Math.ceil(to)).reduce((most, {length}) => Math.max(most, length), 3);
    const [down, across] = [view.r1 - view.r0, view.c1 - view.c0];
    plot.x = within(18 + 7.5 * longest('rows', view.r0, view.r1), 40, width < 420 ? 62 : 92);
    plot.y = across > 60 ? 30 : 21 + Math.min(longest('cols', view.c0, view.c1), 11) * 5.5;
    // Where the map begins high on the page, all of it is to be seen at once. The card may stick to the window; its panel does not.
    const top = (/** @type {Element | null} */ node) => node?.getBoundingClientRect().top ?? 0;
    const begins = top(root.parentElement) + scrollY + top(drawn.canvas) - top(root);
    const most = within(innerHeight - begins - plot.y - 58, 360, 680);
    // The slanted name of the last column goes on to the right of it.
    const beyond = across > 60 ? 0 : 4.4 * Math.min(12, names('cols')[Math.ceil(view.c1) - 1]?.length ?? 0);
    plot.w = Math.min(width - plot.x - Math.max(10, beyond), across * LARGEST_CELL, most * Math.max(1, Math.min(1.4, across / down)));
    plot.h = Math.max(Math.min(most, down * 20), Math.min(down * (plot.w / across), plot.w * 1.2, down * LARGEST_CELL, most));
  }
  /** @param {Tile} tile */
  function paint({values, rows, cols, by, rowmax}) {
    if (scale() !== 'row max') return bitmap(values, rows, cols, scale() === 'sqrt' ? Math.sqrt : undefined);
    const most = new Float32Array(rows).fill(rowmax ? 0 : 1);
    rowmax?.forEach((value, r) => (most[Math.floor(r / by[0])] = Math.max(value, most[Math.floor(r / by[0])])));
    return bitmap(values, rows, cols, (value, at) => value / (most[Math.floor(at / cols)] || 1));
  }
  /** @param {Ink} ink */
  function draw(ink) {
    bar.getContext('2d')?.putImageData(new ImageData(new Uint8ClampedArray(ramp()), 256, 1), 0, 0);
    if (!whole) return;
    ink.save();
    ink.beginPath();
    ink.rect(plot.x, plot.y, plot.w, plot.h);
    ink.clip();
    ink.imageSmoothingEnabled = false;
    for (const tile of [whole, near]) {
      if (!tile) continue;
      const [r, , c] = tile.box;
      // The last pooled row or column may stand for fewer tokens than the others; the clip takes what is too much.
      ink.drawImage((tile.picture ??= paint(tile)), toX(c), toY(r), toX(c + tile.cols * tile.by[1]) - toX(c), toY(r + tile.rows * tile.by[0]) - toY(r));
    }
    if (subject?.hard && isHard()) drawHard(ink, near ?? whole);
    ink.restore();
    ink.strokeStyle = colour('--line');
    ink.strokeRect(plot.x - 0.5, plot.y - 0.5, plot.w + 1, plot.h + 1);
    drawNames(ink, 'rows');
    drawNames(ink, 'cols');
    if (!cell) return;
    const [y, x] = [toY(cell.r), toX(cell.c)], [h, w] = [Math.max(2, toY(1) - toY(0)), Math.max(2, toX(1) - toX(0))];
    if (cell.r >= view.r0 && cell.r < view.r1) ring(ink, plot.x - 1, y, plot.w + 2, h);
    if (cell.c >= view.c0 && cell.c < view.c1) ring(ink, x, cell.r < 0 ? plot.y - 1 : y, w, cell.r < 0 ? plot.h + 2 : h);
  }
  /** A ring at the largest weight of each row. @param {Ink} ink @param {Tile} tile */
  function drawHard(ink, {box, rows, cols, by, values}) {
    const [h, w] = [toY(by[0]) - toY(0), toX(by[1]) - toX(0)];
    for (let r = 0; r < rows; r++) {
      let best = 0;
      for (let c = 1; c < cols; c++) if (values[r * cols + c] > values[r * cols + best]) best = c;
      ink.beginPath();
      ink.ellipse(toX(box[2] + best * by[1]) + w / 2, toY(box[0] + r * by[0]) + h / 2, Math.max(1, Math.min(7, w / 3)), Math.max(1, Math.min(7, h / 3)), 0, 0, 7);
      // Light below, so that the ring is seen on the darkest cell too.
      for (const [name, width] of /** @type {const} */ ([['--card', 3.5], ['--warm', 1.5]])) {
        ink.strokeStyle = colour(name);
        ink.lineWidth = width;
        ink.stroke();
      }
    }
  }
  /** Tokens where there is room for them, places otherwise. @param {Ink} ink @param {Edge} which */
  function drawNames(ink, which) {
    const down = which === 'rows', tokens = names(which);
    const [from, to, size] = down ? [view.r0, view.r1, plot.h] : [view.c0, view.c1, plot.w];
    const each = size / (to - from), all = each >= 11, most = down && plot.x < 80 ? 8 : 12;
    const step = all ? 1 : [2, 5, 10, 20, 50, 100, 200, 500, 1000].find((nice) => nice * each >= 40) ?? 2000;
    ink.textAlign = down ? 'right' : all ? 'left' : 'center';
    for (let i = Math.ceil(from / step) * step; i < to; i += step) {
      const word = all ? visible(tokens[i] ?? String(i)) : String(i);
      ink.fillStyle = colour(cell && (down ? cell.r : cell.c) === i ? '--ink' : '--soft');
      ink.save();
      if (down) ink.translate(plot.x - 7, toY(i + 0.5));
      else ink.translate(toX(i + 0.5), plot.y - 9);
      if (!down && all) ink.rotate(-Math.PI / 3.2);
      if (i + 0.5 >= from && i + 0.5 <= to) ink.fillText(`\u2068${word.length > most ? `${word.slice(0, most - 1)}…` : word}\u2069`, 0, 0);
      ink.restore();
    }
  }
  /** The finest value known of a cell, and the first row and column it stands for. */
  function valueAt(r = 0, c = 0) {
    const tile = near && r >= near.box[0] && r < near.box[1] && c >= near.box[2] && c < near.box[3] ? near : whole;
    if (!tile) return {value: 0, r, c, by: [1, 1]};
    const {box, by, cols, values} = tile;
    const [y, x] = [Math.floor((r - box[0]) / by[0]), Math.floor((c - box[2]) / by[1])];
    return {value: values[y * cols + x], r: box[0] + y * by[0], c: box[2] + x * by[1], by};
  }
  function words(row = 0, column = 0) {
    const {value, r, c, by: [y, x]} = valueAt(row, column);
    return `${name('rows', r, y)} → ${name('cols', c, x)}: ${value.toFixed(4)}${x * y > 1 ? ` (largest of ${y} × ${x}; zoom in)` : ''}`;
  }
  function pointed(x = 0, y = 0) {
    const [r, c] = [Math.floor(toR(y)), Math.floor(toC(x))];
    if (!subject || x < plot.x || x >= plot.x + plot.w || y < plot.y || y >= plot.y + plot.h || r >= T || c >= S) return null;
    if (cell?.r !== r || cell.c !== c) {
      cell = {r, c};
      page.focus({side: subject.rows, at: r + ahead()});
    }
    return words(r, c);
  }
  /** Shade the strip by the row (or the column) in focus: at once from the map, then exactly where the map is pooled. */
  function shadeFocus() {
    clearTimeout(rowTimer);
    drawn.redraw();
    if (!subject || !whole) return;
    const {rows, cols, exact} = subject;
    if (rows !== cols || !cell) page.shade(cell && cell.r < 0 ? cols : rows, null);
    readout.textContent = HINT;
    if (!cell) return page.shade(cols, null);
    const {r, c} = cell;
    if (r < 0) return page.shade(rows, scaled(Float32Array.from({length: T + ahead()}, (_, i) => (i < ahead() ? 0 : valueAt(i - ahead(), c).value))));
    const line = Float32Array.from({length: S}, (_, i) => valueAt(r, i).value);
    page.shade(cols, scaled(line));
    const best = line.reduce((most, value, i) => (value > line[most] ? i : most), 0);
    readout.textContent = c < 0 ? `${name('rows', r)} attends most to ${name('cols', best)}: ${line[best].toFixed(4)}` : words(r, c);
    if (!exact || !isPooled()) return;
    rowTimer = window.setTimeout(() => page.ask(...exact(r), 'row').then(({arrays}) => {
      if (cell?.r === r) page.shade(cols, scaled(arrays.weights));
    }, () => {}), 90);
  }
  /** @param {Numbers} weights */
  function scaled(weights) {
    const most = scale() === 'row max' ? Array.from(weights).reduce((a, b) => Math.max(a, b), 1e-9) : 1;
    return Float32Array.from(weights, (value) => (scale() === 'sqrt' ? Math.sqrt(value) : value / most));
  }

  function reset() {
    near = null;
    look(0, T, 0, S);
  }
  /** @param {number} c the place that stays where it is */
  function zoom(by = 0, r = 0, c) {
    const span = (from = 0, to = 0, at = 0, all = 0) => {
      const size = Math.min(all, Math.max(4, (to - from) * by));
      const start = within(at - ((at - from) / (to - from)) * size, 0, all - size);
      return [start, start + size];
    };
    const [[r0, r1], [c0, c1]] = [span(view.r0, view.r1, r, T), span(view.c0, view.c1, c, S)];
    look(r0, r1, c0, c1);
  }
  function pan(dr = 0, dc = 0) {
    const [h, w] = [view.r1 - view.r0, view.c1 - view.c0];
    const r = within(view.r0 + dr, 0, T - h), c = within(view.c0 + dc, 0, S - w);
    look(r, r + h, c, c + w);
  }
  function look(r0 = 0, r1 = 0, c0 = 0, c1 = 0) {
    view = {r0, r1, c0, c1};
    drawn.redraw();
    clearTimeout(zoomTimer);
    zoomTimer = window.setTimeout(sharpen, 120);
  }
  /** Where the whole map is pooled, ask for the part in view. */
  function sharpen() {
    const mine = subject;
    const box = [Math.floor(view.r0), Math.ceil(view.r1), Math.floor(view.c0), Math.ceil(view.c1)];
    if (!mine?.exact || !isPooled() || (box[1] - box[0] >= T && box[3] - box[2] >= S)) return;
    page.ask(...mine.asked(box), 'map-near').then((answer) => {
      if (subject !== mine) return;
      near = tileOf(answer, box);
      drawn.redraw();
    }, () => {});
  }
  function keys(key = '') {
    const step = {...ARROWS, PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -S], End: [0, S]}[key];
    if (key === '+' || key === '=') zoom(CLOSER, ...(cell ? /** @type {const} */ ([cell.r, Math.max(0, cell.c)]) : middle()));
    else if (key === '-') zoom(1 / CLOSER, ...middle());
    else if (key === '0') reset();
    else if (!step || !subject) return false;
    else {
      const from = cell ?? {r: Math.floor(view.r0) - step[0], c: Math.floor(view.c0) - step[1]};
      const {r, c} = (cell = {r: within(Math.max(0, from.r) + step[0], 0, T - 1), c: within(Math.max(0, from.c) + step[1], 0, S - 1)});
      page.focus({side: subject.rows, at: r + ahead()});
      const out = (at = 0, low = 0, high = 0) => (at < low ? at - low : at >= high ? at + 1 - high : 0);
      if (out(r, view.r0, view.r1) || out(c, view.c0, view.c1)) pan(out(r, view.r0, view.r1), out(c, view.c0, view.c1));
    }
    return true;
  }
  // The wheel belongs to the page until the map is taken up (clicked or tabbed to), or Ctrl or a pinch says so.
  drawn.canvas.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && document.activeElement !== drawn.canvas) return;
    event.preventDefault();
    zoom(Math.exp(within(event.deltaY, -60, 60) / 200), toR(event.offsetY), toC(event.offsetX));
  }, {passive: false});
  drawn.canvas.addEventListener('pointermove', (event) => {
    if (!(event.buttons & 1)) return;
    drawn.canvas.setPointerCapture(event.pointerId);
    pan(toR(0) - toR(event.movementY), toC(0) - toC(event.movementX));
  });

  /** @param {Answer} answer @param {number[]} box @returns {Tile} */
  function tileOf({arrays, shapes, pooled}, box) {
    const kind = arrays.map ? 'map' : 'rollout';
    const [rows, cols] = shapes[kind];
    return {box, rows, cols, by: pooled ?? [Math.ceil((box[1] - box[0]) / rows), Math.ceil((box[3] - box[2]) / cols)],
      values: /** @type {Float32Array} */ (arrays[kind]), rowmax: /** @type {Float32Array} */ (arrays.rowmax) ?? null, picture: null};
  }
  /** @param {Tile} tile */
  function describe({values, cols, by}) {
    /** @type {[number, number][]} value and place; cut now and then, so that all is never sorted */
    let top = [], least = 0;
    const best = () => (top = top.sort(([a], [b]) => b - a).slice(0, 20));
    for (let at = 0; at < values.length; at++) if (values[at] > least && top.push([values[at], at]) > 200) least = best()[19][0];
    if (!top.length) return drawn.say(`${subject?.title}: all weights are 0.`);
    const pairs = best().map(([value, at]) => [name('rows', Math.floor(at / cols) * by[0], by[0]), name('cols', (at % cols) * by[1], by[1]), value.toFixed(4)]);
    // The first token of a causal head can only attend to itself, which tells nothing.
    const alone = subject?.rows === subject?.cols && values[0] > 0.9999;
    const [from, to, weight] = pairs[Math.max(0, top.findIndex(([, at]) => at || !alone))];
    drawn.say(`${subject?.title}, ${T} × ${S}. Strongest: ${from} → ${to} at ${weight}.` +
      (isPooled() ? ` Each point is the largest of ${by[0]} × ${by[1]} weights.` : ''), ['from', 'to', 'weight'], pairs);
  }
  /** @param {Subject} news */
  return (news) => page.load(root, 'map', ...news.asked(null), (answer) => {
    const before = [subject?.rows, subject?.cols, T, S].join();
    subject = news;
    [T, S] = [answer.T ?? names('rows').length, answer.S ?? names('cols').length];
    whole = tileOf(answer, [0, T, 0, S]);
    near = null;
    hardControl.hidden = !news.hard;
    if (before === [news.rows, news.cols, T, S].join()) sharpen();
    else reset();
    describe(whole);
    shadeFocus();
  });
}
