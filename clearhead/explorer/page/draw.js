/** Shared pieces of every panel: elements, controls, colours, figures with their words, charts, the tooltip. */

import {explained} from './glossary.js';
import {saveRow} from './save.js';

/** An element with its attributes (`on…` are listeners) and children.
 * @template {keyof HTMLElementTagNameMap} K @param {K} tag @param {Told} [told] @param {...Child} children @returns {HTMLElementTagNameMap[K]} */
export function el(tag, told = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(told)) {
    if (typeof value === 'function') node.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : String(value));
  }
  node.append(.../** @type {(Node | string)[]} */ (children.filter(Boolean)));
  return node;
}

/** A card with a heading; panels are made of these. @param {...Child} children */
export const card = (title = '', words = '', ...children) => el('section', {class: 'card'}, el('h2', {}, title), words && el('p', {class: 'note'}, ...explained(words)), ...children);
export const note = (words = '') => el('p', {class: 'note'}, words);
export const row = (/** @type {Child[]} */ ...children) => el('div', {class: 'row'}, ...children);
export const controls = (/** @type {Child[]} */ ...children) => el('div', {class: 'controls'}, ...children);

/** Among many, one is reached by Tab: this one now. @param {Box} list @param {Box} [node] */
export function rove(list, node) {
  if (!node) return;
  list.querySelector('[tabindex="0"]')?.setAttribute('tabindex', '-1');
  node.tabIndex = 0;
  node.focus();
}

/** Steps down and across. @type {{[key: string]: [number, number]}} */
export const ARROWS = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
export const within = (value = 0, low = 0, high = 1) => Math.max(low, Math.min(high, value));
/** The least and the most; no spreading, which a long array does not survive. @param {Numbers} values */
export function extent(values) {
  let low = Infinity, high = -Infinity;
  for (let i = 0; i < values.length; i++) [low, high] = [Math.min(low, values[i]), Math.max(high, values[i])];
  return [low, high];
}

/** A token with its blanks made visible; characters that nobody sees alone as U+0301. */
export function visible(token = '') {
  const text = token.replace(/[ \u2581\u0120]/g, '·').replace(/[\n\u010a]/g, '↵').replace(/\t/g, '⇥');
  if (!/^[\p{C}\p{Z}\p{M}]*$/u.test(text)) return text;
  return [...text].map((each) => `U+${(each.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, '0')}`).join(' ') || '∅';
}
/** For sentences and canvases: a right-to-left token must not turn its neighbours round. */
export const quoted = (token = '') => `“\u2068${visible(token)}\u2069”`;
export const percent = (p = 0) => (p >= 0.0995 ? `${Math.round(p * 100)}%` : p >= 0.00095 ? `${(p * 100).toFixed(1)}%` : p > 0 ? '<0.1%' : '0%');
/** 1234567 as 1.23 M. */
export function short(value = 0) {
  const size = Math.abs(value);
  // A length, such as 8,192, is known by all its digits.
  if (size >= 1e3 && size < 1e5 && Number.isInteger(value)) return value.toLocaleString('en');
  const power = Math.min(5, Math.floor(Math.log10(size) / 3));
  if (size >= 1e3) return `${Number((value / 1000 ** power).toPrecision(3))} ${'kMGTP'[power - 1]}`;
  return size >= 1e-3 || !size ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

const probe = el('span', {hidden: true});
/** @type {Map<string, string>} */
let colours = new Map();
/** A CSS variable's colour as the theme resolves it now, for the canvas. */
export function colour(name = '--ink') {
  let found = colours.get(name);
  if (!found) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${name})`;
    colours.set(name, (found = getComputedStyle(probe).color));
  }
  return found;
}
export let dark = false;

// One hue path, lightness strictly monotone, zero = the card's own colour: nothing attended is nothing drawn.
const RAMPS = {
  light: [[255, 255, 255], [222, 235, 240], [158, 202, 211], [82, 158, 178], [34, 108, 146], [27, 62, 110], [22, 22, 64]],
  dark: [[24, 26, 31], [28, 46, 66], [27, 78, 104], [30, 118, 134], [62, 163, 147], [140, 208, 146], [246, 240, 168]],
};
/** @param {number[][]} stops */
function spread(stops) {
  const table = new Uint8ClampedArray(256 * 4);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    for (let c = 0; c < 3; c++) table[4 * i + c] = stops[low][c] + (stops[low + 1][c] - stops[low][c]) * (at - low);
    table[4 * i + 3] = 255;
  }
  return table;
}
const TABLES = {light: spread(RAMPS.light), dark: spread(RAMPS.dark)};
/** 256 RGBA colours for 0..1 in this theme. */
export const ramp = () => TABLES[dark ? 'dark' : 'light'];
/** @param {number} value 0..1 */
export function shadeOf(value) {
  const table = ramp();
  const at = 4 * Math.round(255 * within(value));
  return `rgb(${table[at]},${table[at + 1]},${table[at + 2]})`;
}
/** Ink that can be read on a shade. */
export const inkOn = (value = 0) => ((value > 0.45) !== dark ? '#fff' : '#14161a');

/** Values 0..1 as a picture one pixel a value, to be drawn larger without smoothing. @param {Numbers} values @param {(value: number, at: number) => number} [scale] */
export function bitmap(values, rows = 1, cols = 1, scale = (value) => value) {
  const image = new ImageData(Math.max(1, cols), Math.max(1, rows));
  const words = new Uint32Array(image.data.buffer);
  const table = new Uint32Array(ramp().buffer);
  for (let i = 0; i < rows * cols; i++) words[i] = table[Math.round(255 * within(scale(values[i], i)))];
  const canvas = el('canvas', {width: image.width, height: image.height});
  canvas.getContext('2d')?.putImageData(image, 0, 0);
  return canvas;
}

document.addEventListener('pointerdown', ({target}) => {
  if (!(target instanceof HTMLCanvasElement)) tip(null);
});
const tipBox = el('div', {class: 'tip', hidden: true, 'aria-hidden': 'true'});
/** At a place in the window. @param {string | null} words */
export function tip(words, x = 0, y = 0) {
  tipBox.hidden = !words;
  if (!words) return;
  if (!tipBox.isConnected) document.body.append(tipBox);
  if (tipBox.textContent !== words) tipBox.textContent = words;
  const {offsetWidth: w, offsetHeight: h} = tipBox;
  const left = within(x + 14, 8, innerWidth - w - 8);
  const top = y + 18 + h > innerHeight ? y - h - 10 : y + 18;
  tipBox.style.transform = `translate(${left}px, ${Math.max(8, top)}px)`;
}

/** @type {Map<Box, () => void>} */
const painted = new Map();
/** Have `redraw` called when the theme changes, while the node is in the page. @param {Box} node @param {() => void} redraw */
export const watch = (node, redraw) => void painted.set(node, redraw);
/** Draw everything again in the theme's colours. */
export function repaint() {
  colours = new Map();
  dark = document.documentElement.dataset.theme === 'dark';
  for (const [node, redraw] of painted) {
    if (node.isConnected) redraw();
    else painted.delete(node);
  }
}

/** A canvas in device pixels that follows its box and the theme, with its summary and its table beside it.
 * @param {Box} root @param {FigureKind} kind @returns {Figure} */
export function figure(root, kind) {
  const canvas = el('canvas', {role: kind.keys ? 'application' : 'img', 'aria-label': kind.label, tabindex: kind.keys ? '0' : null});
  const bar = controls();
  const summary = el('p', {class: 'summary'});
  const table = tableBox('As a table', kind.label);
  const caption = el('figcaption', {}, summary, table.node);
  const node = el('figure', {}, bar, canvas, caption);
  root.append(node);
  let asked = false;
  const paint = () => {
    asked = false;
    const width = canvas.clientWidth;
    if (!width) return;
    const height = typeof kind.height === 'function' ? kind.height(width) : kind.height;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const ink = /** @type {Ink} */ (canvas.getContext('2d'));
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, width, height);
    ink.direction = 'ltr';
    drawOn(ink, width, height);
  };
  /** @param {Ink} ink */
  function drawOn(ink, width = 0, height = 0) {
    ink.font = font(12);
    ink.textBaseline = 'middle';
    kind.draw(ink, width, height);
  }
  caption.append(saveRow(canvas, kind, drawOn));
  const redraw = () => {
    if (!asked) requestAnimationFrame(paint);
    asked = true;
  };
  new ResizeObserver(redraw).observe(canvas);
  const {hover, click, keys} = kind;
  if (hover) {
    const point = (/** @type {PointerEvent} */ event) => tip(hover(event.offsetX, event.offsetY), event.clientX, event.clientY);
    canvas.addEventListener('pointermove', point);
    canvas.addEventListener('pointerdown', point);
    canvas.addEventListener('pointerleave', ({pointerType}) => {
      // A finger leaves as it is lifted: what it tapped stays to be read.
      if (pointerType === 'touch') return;
      tip(null);
      kind.leave?.();
    });
  }
  if (click) canvas.addEventListener('click', (event) => click(event.offsetX, event.offsetY));
  if (keys) canvas.addEventListener('keydown', (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && keys(event.key, event)) event.preventDefault();
  });
  /** @type {Figure} */
  const made = {node, canvas, caption, controls: bar, redraw, say(words, columns = [], rows = []) {
    summary.textContent = words;
    if (kind.keys) canvas.setAttribute('aria-description', words);
    else canvas.setAttribute('aria-label', `${kind.label}. ${words}`);
    table.show(columns, rows);
  }};
  watch(node, redraw);
  return made;
}

/** A table to be opened, of the first 20 rows; hidden while it has none. */
export function tableBox(title = '', label = title) {
  const table = el('table');
  const node = el('details', {hidden: true}, el('summary', {}, title), el('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': `${label}: table`}, table));
  /** @param {string[]} columns @param {(string | number)[][]} rows */
  const show = (columns, rows) => {
    node.hidden = !rows.length;
    table.replaceChildren(el('thead', {}, el('tr', {}, ...columns.map((name) => el('th', {scope: 'col'}, name)))),
      el('tbody', {}, ...rows.slice(0, 20).map((row) => el('tr', {}, ...row.map((value) => el('td', {}, el('bdi', {}, String(value))))))));
  };
  return {node, show};
}

export const font = (size = 0, weight = 400) => `${weight} ${size}px ${(family ||= getComputedStyle(document.body).fontFamily)}`;
let family = '';

/** Lines over one another on shared axes, with a legend, marks and a read-out of the nearest x. @param {Box} root @returns {Chart} */
export function chart(root, label = '', height = 260) {
  /** @type {ChartKind} */
  let kind = {series: [], x: {label: ''}, y: {label: ''}};
  /** @type {Axis | null} */
  let across = null;
  let at = -1;
  const legend = el('div', {class: 'legend'});
  /** These colours stay apart for colour-blind eyes. @param {Series} one */
  const tint = (one, i = 0) => `--line-${(one.colour ?? i) % 6}`;
  const made = figure(root, {
    label, height,
    legend: () => [...kind.series.map((one, i) => ({name: one.name, tint: tint(one, i), dash: one.dash})), {name: kind.y.label}],
    draw(ink, width) {
      const {series, marks = []} = kind;
      if (!series.length) return;
      const left = 56, right = width - 16, top = 14, bottom = height - 40;
      const x = (across = axis(series.flatMap((one) => Array.from(one.x)), kind.x, left, right));
      const y = axis([...series.flatMap((one) => Array.from(one.y)), ...(kind.y.zero ? [0] : [])], kind.y, bottom, top);
      ink.lineWidth = 1;
      ink.fillStyle = colour('--soft');
      ink.strokeStyle = colour('--line');
      ink.textAlign = 'right';
      for (const tick of y.ticks) {
        rule(ink, left, y.to(tick), right, y.to(tick));
        ink.fillText(short(tick), left - 8, y.to(tick));
      }
      ink.textAlign = 'center';
      for (const tick of x.ticks) ink.fillText(short(tick), x.to(tick), bottom + 14);
      ink.fillText(kind.x.label, (left + right) / 2, height - 9);
      series.forEach((one, i) => {
        ink.strokeStyle = ink.fillStyle = colour(tint(one, i));
        ink.lineWidth = 2;
        ink.setLineDash(one.dash ? [5, 4] : []);
        ink.beginPath();
        for (let j = 0; j < one.x.length; j++) {
          if (one.dots) ink.rect(x.to(one.x[j]) - 2.5, y.to(one.y[j]) - 2.5, 5, 5);
          else ink.lineTo(x.to(one.x[j]), y.to(one.y[j]));
        }
        if (one.dots) ink.fill();
        else ink.stroke();
        if (!one.fill || !one.x.length) return;
        ink.lineTo(x.to(one.x[one.x.length - 1]), bottom);
        ink.lineTo(x.to(one.x[0]), bottom);
        ink.globalAlpha = 0.15;
        ink.fill();
        ink.globalAlpha = 1;
      });
      ink.setLineDash([3, 3]);
      ink.lineWidth = 1;
      ink.strokeStyle = ink.fillStyle = colour('--ink');
      for (const mark of marks) {
        const place = x.to(mark.x), late = place > width / 2;
        if (place < left - 1 || place > right + 1) continue;
        rule(ink, place, top, place, bottom);
        ink.textAlign = late ? 'right' : 'left';
        ink.fillText(mark.label, place + (late ? -6 : 6), top + 6);
      }
      ink.setLineDash([]);
      if (at >= 0) rule(ink, x.to(series[0].x[at]), top, x.to(series[0].x[at]), bottom);
    },
    hover(px) {
      const axis = across, [first] = kind.series;
      if (!axis || !first) return null;
      if (at !== (at = nearest(first.x, px, axis))) made.redraw();
      return [`${kind.x.label} ${short(first.x[at])}`, ...kind.series.map(({name, x, y}) => `${name}: ${short(y[nearest(x, axis.to(first.x[at]), axis)])}`)].join('\n');
    },
    leave() {
      at = -1;
      made.redraw();
    },
  });
  made.canvas.before(legend);
  return {...made, show(news) {
    kind = news;
    at = -1;
    legend.replaceChildren(...news.series.map((one, i) => {
      const key = el('i', {class: one.dash ? 'dash' : ''});
      key.style.color = `var(${tint(one, i)})`;
      return el('span', {}, key, one.name);
    }), el('span', {class: 'unit'}, news.y.label));
    made.redraw();
  }};
}

/** From and to are pixels. @param {number[]} values @param {{log?: boolean}} kind @returns {Axis} */
export function axis(values, {log}, from = 0, to = 0) {
  const fine = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  let [low, high] = extent(fine);
  if (!fine.length) [low, high] = [log ? 1 : 0, log ? 10 : 1];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) / 2 || 0.5), high + (Math.abs(high) / 2 || 0.5)];
  const many = Math.max(2, Math.abs(to - from) / (to < from ? 44 : 80));
  /** @type {number[]} */
  const ticks = [];
  if (log) {
    const decades = Math.log10(high / low);
    // As many in each tenfold as there is room for.
    const marks = [[1, 2, 5], [1, 3]].find((some) => some.length * decades <= many + 1) ?? [1];
    const every = Math.max(1, Math.ceil(decades / many));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
      for (const mark of marks) if (mark * 10 ** power >= low * 0.999 && mark * 10 ** power <= high * 1.001) ticks.push(mark * 10 ** power);
    }
  }
  if (ticks.length < 2) {
    ticks.length = 0;
    const rough = (high - low) / many;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 2.5, 5, 10].find((nice) => nice * power >= rough) ?? 10);
    for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) ticks.push(Number(tick.toPrecision(10)));
  }
  const scale = log ? Math.log : (value = 0) => value;
  const span = scale(high) - scale(low);
  return {ticks, to: (value) => from + ((scale(log ? Math.max(value, low / 10) : value) - scale(low)) / span) * (to - from)};
}

/** @param {Ink} ink */
export function rule(ink, x0 = 0, y0 = 0, x1 = 0, y1 = 0) {
  ink.beginPath();
  ink.moveTo(Math.round(x0) + 0.5, Math.round(y0) + 0.5);
  ink.lineTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
  ink.stroke();
}

/** @param {Numbers} xs @param {Axis} axis */
function nearest(xs, px = 0, axis) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(axis.to(xs[i]) - px) < Math.abs(axis.to(xs[best]) - px)) best = i;
  return best;
}

/** Outline a place. @param {Ink} ink */
export function ring(ink, x = 0, y = 0, w = 0, h = 0) {
  ink.strokeStyle = colour('--warm');
  ink.lineWidth = 2;
  ink.strokeRect(x, y, w, h);
}

let ids = 0;
/** A labelled slider with its value beside it. @param {number[]} range least, most, step @param {(value: number) => void} change */
export function slider(label = '', range, value = 0, change, words = (value = 0) => String(value)) {
  const [min, max, step = 1] = range;
  const id = `control-${++ids}`;
  const out = el('output', {for: id}, words(value));
  const input = el('input', {type: 'range', id, min, max, step, oninput: () => {
    out.textContent = words(input.valueAsNumber);
    change(input.valueAsNumber);
  }});
  input.value = String(value);
  return el('div', {class: 'control slider'}, el('label', {for: id}, label), input, out);
}

/** A labelled choice: a few options side by side, more in a list. @param {Options} options @param {(value: string) => void} change */
export function choice(label = '', options, value = '', change) {
  const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  const id = `control-${++ids}`;
  if (pairs.length > 4) {
    const select = el('select', {id, onchange: () => change(select.value)}, ...pairs.map(([key, words]) => el('option', {value: key, selected: key === value}, words)));
    return el('div', {class: 'control'}, el('label', {for: id}, label), select);
  }
  return el('fieldset', {class: 'control choice'}, el('legend', {}, label), el('div', {class: 'segments'}, ...pairs.map(([key, words]) =>
    el('label', {}, el('input', {type: 'radio', name: id, value: key, checked: key === value, onchange: () => change(key)}), el('span', {}, words)))));
}

/** @param {(value: boolean) => void} change */
export function toggle(label = '', value = false, change) {
  const input = el('input', {type: 'checkbox', checked: value, onchange: () => change(input.checked)});
  return el('label', {class: 'control toggle'}, input, el('span', {}, label));
}

/** A text that is told after a pause in typing. @param {(text: string) => void} change */
export function textField(label = '', rows = 1, change) {
  let timer = 0;
  const area = el('textarea', {rows, spellcheck: 'false', dir: 'auto', oninput: () => {
    clearTimeout(timer);
    timer = window.setTimeout(() => change(area.value), 250);
  }});
  return {area, node: el('label', {class: 'field'}, el('span', {}, label), area)};
}

/** A choice kept in the address. @param {State} state @param {Options} options */
export const keptChoice = (state, key = '', usual = '', label = '', options) => choice(label, options, state.get(key, usual), (value) => state.set({[key]: value}));

/** The kind of the button that matters is 'main'. @param {() => void} press */
export const button = (label = '', press, kind = '', name = '') => el('button', {type: 'button', class: kind, 'aria-label': name || null, onclick: press}, label);

/** Guesses as bars: token, bar, percent; `before` draws a mark where each stood without the changes.
 * @param {Guess[]} top @param {Guess[] | null} [before] */
export function bars(top, before = null) {
  const old = new Map((before ?? []).map((guess) => [guess.id, guess.p]));
  return el('ol', {class: 'bars'}, ...top.map((guess) => el('li', {class: before ? 'changed' : ''},
    ...barOf(guess.token ?? guess.label, guess.p, {p: guess.p, was: old.get(guess.id) ?? 0}))));
}

/** A token, its bar and its percent; the bar's lengths are variables of the style sheet. @param {{[name: string]: number}} lengths */
export function barOf(token = '', p = 0, lengths) {
  const bar = el('i', {class: 'bar'});
  for (const [name, value] of Object.entries(lengths)) bar.style.setProperty(`--${name}`, String(value));
  return [el('bdi', {class: 'token'}, visible(token)), bar, el('b', {}, percent(p))];
}

/** Whether any request of this name is answered: by a server always, in an exported page if it computes by itself. */
export const asks = (name = '') => !window.CLEARHEAD_ANSWERS || Boolean(window.CLEARHEAD_LOCAL?.names.includes(name));

/** In a page that holds the answers for one text: controls that ask for more are switched off. @template {Box} T @param {T} box @returns {T} */
export function liveOnly(box, name = 'read') {
  if (asks(name)) return box;
  for (const node of [box, ...box.querySelectorAll('*')]) {
    if (node instanceof HTMLTextAreaElement) node.readOnly = true;
    else if (node instanceof HTMLInputElement || node instanceof HTMLButtonElement || node instanceof HTMLSelectElement) node.disabled = true;
  }
  box.title = 'Not in this exported page: run clearhead explore';
  return box;
}

/** Show (or clear, with null) an error in a panel's own place, in words. @param {Box} box @param {unknown} error */
export function complain(box, error) {
  box.querySelector(':scope > .error')?.remove();
  if (error) box.prepend(el('p', {class: 'error', role: 'alert'}, error instanceof Error ? error.message : String(error)));
}
