/** Attention by hand: Q, K and V as small tables, and softmax(QKᵀ / √d) V step by step, computed here in the page. */
import {ARROWS, card, choice, controls, el, slider, toggle} from './draw.js';

const NAMES = ['the', 'cat', 'sat', 'on', 'a', 'mat'], WIDEST = 16, BETWEEN = '\u001f';
/** @type {['scores' | 'divided' | 'masked' | 'weights' | 'output', string, string, string][]} key, sign, name, words */
const STEPS = [
  ['scores', 'Q Kᵀ', 'Scores', 'The dot product of each query with each key.'],
  ['divided', '÷ √d', 'Scaled', 'Divided by the root of the width d.'],
  ['masked', '+ mask', 'Masked', 'Later tokens get −∞, so their weight is 0.'],
  ['weights', 'softmax', 'Weights', 'Each row becomes positive weights that sum to 1.'],
  ['output', '× V', 'Output', 'The sum of the values, each times its weight.'],
];

/** softmax(QKᵀ / √d) V with every step kept. @param {Hand} hand @param {boolean} scaled @param {boolean} causal */
function attend({q, k, v}, scaled, causal) {
  const scores = q.map((a) => k.map((b) => a.reduce((sum, x, e) => sum + x * b[e], 0)));
  const divided = scores.map((row) => row.map((x) => (scaled ? x / Math.sqrt(q[0].length) : x)));
  const masked = divided.map((row, i) => row.map((x, j) => (causal && j > i ? -Infinity : x)));
  const weights = masked.map(softmax);
  const output = weights.map((row) => v[0].map((_, e) => row.reduce((sum, w, j) => sum + w * v[j][e], 0)));
  return {scores, divided, masked, weights, output};
}

/** @param {number[]} row */
function softmax(row) {
  const most = Math.max(...row); // without it e^x overflows
  const grown = row.map((x) => Math.exp(x - most));
  const sum = grown.reduce((a, b) => a + b, 0);
  return grown.map((x) => x / sum);
}

/** Keys point around a circle; a query is the key of the token it attends to. @type {{[name: string]: [string, (i: number) => number, number, number]}} words, whose, sizes */
const STARTS = {
  back: ['Attend to the token before', (i) => Math.max(0, i - 1), 2, 2], self: ['Attend to itself', (i) => i, 2, 2], first: ['All attend to the first', () => 0, 2, 2],
  even: ['Equal weights', () => 0, 0, 2], loud: ['All weight on one', (i) => i, 6, 6],
};
/** @returns {Hand} */
function begin(start = '', n = 0, d = 0) {
  const [, whose, query, key] = STARTS[start];
  const rows = [...Array(n).keys()];
  const across = [...Array(d).keys()];
  const spoke = (j = 0, size = 0) => across.map((e) => Math.round(size * 10 * Math.cos((2 * Math.PI * j * Math.max(1, e)) / n - (e === 1 ? Math.PI / 2 : 0))) / 10 || 0);
  return {q: rows.map((i) => spoke(whose(i), query)), k: rows.map((j) => spoke(j, key)), v: rows.map((j) => across.map((e) => (j % d === e ? 1 + Math.floor(j / d) : 0)))};
}

/** @param {Hand} hand */
const write = ({q, k, v}) => [q, k, v].map((m) => m.map((row) => row.join(' ')).join(',')).join(';');
/** @returns {Hand} */
function read(text = '') {
  const [q, k, v] = text.split(';').map((m) => m.split(',').map((row) => row.split(' ').map(Number)));
  const fits = [q, k, v].every((m) => m?.length === q.length && m.every((row) => row.length === q[0].length && row.every(Number.isFinite)));
  return fits && q.length <= NAMES.length ? {q, k, v} : begin('back', 4, 2);
}
/** The address of one head's own numbers: the tokens up to `last`, as many as fit here; null if its vectors are too wide to be read.
 * @param {string[]} tokens @param {{[name in keyof Hand]: Numbers}} head @param {{causal: boolean, scaled: boolean}} how */
export function carry(tokens, head, d = 0, last = 0, how) {
  if (d > WIDEST) return null;
  const first = Math.max(0, last + 1 - NAMES.length);
  const rows = (/** @type {Numbers} */ x) => tokens.slice(first, last + 1).map((_, i) => Array.from({length: d}, (__, e) => Number(x[(first + i) * d + e].toFixed(3))));
  return {panel: 'sandbox', 'sandbox.hand': write({q: rows(head.q), k: rows(head.k), v: rows(head.v)}), 'sandbox.names': tokens.slice(first, last + 1).join(BETWEEN),
    'sandbox.causal': how.causal ? '1' : null, 'sandbox.sqrt': how.scaled ? null : '0'};
}
const short = (x = 0) => (x === -Infinity ? '−∞' : String(Number(x.toFixed(2))).replace('-', '−'));

/** @type {PanelKind['panel']} */
export function panel(root, {state}) {
  let hand = read(state.get('sandbox.hand'));
  // A head of the model brings its tokens along.
  const names = () => {
    const own = state.get('sandbox.names').split(BETWEEN).filter(Boolean);
    return [...own, ...NAMES.slice(own.length)];
  };
  let [row, col] = [2, 1];
  let made = attend(hand, true, false);
  /** @type {(() => void)[]} what follows the numbers and the chosen cell */
  let follow = [];
  const scaled = () => state.get('sandbox.sqrt') !== '0';
  const causal = () => state.get('sandbox.causal') === '1';
  const formula = el('p', {class: 'formula'});
  const bar = controls();
  const inputs = el('div', {class: 'hands'});
  const steps = el('div', {class: 'hands'});
  const heading = el('h3', {});
  const story = el('ol', {class: 'story'});
  root.append(card('Attention by hand', 'Change any number; all that follows is computed at once.', formula, bar, inputs),
    card('Step by step', 'Point at a cell, or use arrow keys in the weights.', steps, el('div', {class: 'working', role: 'status'}, heading, story)));

  /** @param {Hand} news */
  function set(news) {
    hand = news;
    state.set({'sandbox.hand': write(hand)});
  }
  function resize(n = 0, d = 0) {
    const fresh = begin('back', n, d);
    for (const m of /** @type {(keyof Hand)[]} */ (['q', 'k', 'v'])) fresh[m] = fresh[m].map((line, i) => line.map((x, e) => hand[m][i]?.[e] ?? x));
    set(fresh);
    build();
  }
  // Made anew with the tables, so that they follow an address that changes.
  const knobs = () => [
    choice('Begin with', [['', 'choose'], ...Object.entries(STARTS).map(([key, [words]]) => [key, words])], '', (start) => {
      if (start) {
        state.set({'sandbox.names': null});
        set(begin(start, hand.q.length, Math.min(4, hand.q[0].length)));
      }
      build();
    }),
    toggle('Divide by √d', scaled(), (on) => state.set({'sandbox.sqrt': on ? null : '0'})),
    toggle('Causal mask', causal(), (on) => state.set({'sandbox.causal': on ? '1' : null})),
    slider('Tokens', [2, 6], hand.q.length, (n) => resize(n, hand.q[0].length)),
    slider('Width d', [1, Math.max(4, hand.q[0].length)], hand.q[0].length, (d) => resize(hand.q.length, d))];
  function build() {
    [row, col] = [Math.min(row, hand.q.length - 1), Math.min(col, hand.q.length - 1)];
    follow = [];
    Object.assign(bar.querySelector('select') ?? {}, {value: ''});
    inputs.replaceChildren(editable('q', 'Queries', 'compared with the keys'), editable('k', 'Keys', 'compared with queries'), editable('v', 'Values', 'averaged by weight'));
    steps.replaceChildren(...STEPS.map(shown));
    compute();
  }

  /** @param {Box} table */
  const box = (sign = '', name = '', note = '', table) => el('div', {class: 'hand'}, el('h3', {}, el('b', {}, sign), ' ', name), el('p', {class: 'note'}, note), table);
  /** @param {keyof Hand} name */
  function editable(name, title = '', words = '') {
    const lines = hand[name].map((line, i) => {
      const tr = el('tr', {}, el('th', {scope: 'row'}, names()[i]), ...line.map((x, e) => {
        const input = el('input', {type: 'number', step: 0.1, value: x, 'aria-label': `${title}, ${names()[i]}, number ${e + 1}`, oninput: () => {
          if (!Number.isFinite(input.valueAsNumber)) return;
          hand[name][i][e] = input.valueAsNumber;
          set(hand);
          compute();
        }});
        return el('td', {}, input);
      }));
      follow.push(() => tr.classList.toggle('used', i === (name === 'q' ? row : col)));
      return tr;
    });
    return box(name.toUpperCase(), title, words, el('table', {}, el('tbody', {}, ...lines)));
  }

  /** @param {typeof STEPS[number]} step */
  function shown([id, sign, name, words]) {
    const columns = id === 'output' ? hand.v[0].map((_, e) => String(e + 1)) : names().slice(0, hand.k.length);
    const isGrid = id === 'weights';
    const cells = hand.q.map((_, i) => columns.map((__, j) => {
      const point = () => {
        [row, col] = [i, id === 'output' ? col : j];
        compute();
      };
      return el('td', {class: 'cell', role: isGrid && 'gridcell', onpointerenter: point, onclick: point, onfocus: point});
    }));
    const one = box(sign, name, words, el('table', {role: isGrid && 'grid', 'aria-label': name},
      el('thead', {}, el('tr', {}, el('td', {}), ...columns.map((word) => el('th', {scope: 'col'}, word)))),
      el('tbody', {}, ...cells.map((line, i) => el('tr', {}, el('th', {scope: 'row'}, names()[i]), ...line)))));
    if (isGrid) one.addEventListener('keydown', (event) => {
      const move = ARROWS[event.key];
      if (!move) return;
      event.preventDefault();
      cells[row + move[0]]?.[col + move[1]]?.focus();
    });
    follow.push(() => {
      const values = made[id];
      const size = isGrid ? 1 : Math.max(1e-9, ...values.flat().filter(Number.isFinite).map(Math.abs));
      one.classList.toggle('off', id === 'divided' ? !scaled() : id === 'masked' && !causal());
      cells.forEach((line, i) => line.forEach((cell, j) => {
        const x = values[i][j];
        const here = i === row && (id === 'output' || j === col);
        cell.textContent = isGrid ? x.toFixed(2) : short(x);
        cell.style.setProperty('--w', String(Number.isFinite(x) ? Math.abs(x) / size : 0));
        cell.classList.toggle('minus', x < 0);
        cell.classList.toggle('here', here);
        if (isGrid) cell.tabIndex = here ? 0 : -1;
      }));
    });
    return one;
  }

  function compute() {
    made = attend(hand, scaled(), causal());
    const [root, mask] = bar.querySelectorAll('[type=checkbox]');
    Object.assign(root, {checked: scaled()});
    Object.assign(mask, {checked: causal()});
    for (const one of follow) one();
    formula.textContent = `softmax( Q Kᵀ${scaled() ? ' ÷ √d' : ''}${causal() ? ' + mask' : ''} ) × V`;
    const {scores, masked, weights, output} = made;
    const [i, j, width] = [row, col, Math.sqrt(hand.q[0].length)];
    heading.replaceChildren(`How much “${names()[i]}” attends to “${names()[j]}”: `, el('b', {class: 'share'}, weights[i][j].toFixed(3)));
    story.replaceChildren(...[
      `Score: ${hand.q[i].map((x, e) => `${short(x)} × ${short(hand.k[j][e])}`).join(' + ')} = ${short(scores[i][j])}`,
      scaled() ? `Scaled: ${short(scores[i][j])} ÷ ${short(width)} = ${short(scores[i][j] / width)}` : '',
      masked[i][j] === -Infinity ? `Masked: “${names()[j]}” comes after “${names()[i]}”, so the score is −∞ and the weight 0`
        : `Softmax: e^${short(masked[i][j])} ÷ (${masked[i].filter(Number.isFinite).map((x) => `e^${short(x)}`).join(' + ')}) = ${weights[i][j].toFixed(3)}`,
      `Output: ${weights[i].flatMap((w, at) => (w ? `${w.toFixed(2)} × [${hand.v[at].map(short).join(', ')}]` : [])).join(' + ')} = [${output[i].map(short).join(', ')}]`,
    ].filter(Boolean).map((words) => el('li', {}, words)));
  }
  state.subscribe(['sandbox.sqrt', 'sandbox.causal'], compute, bar);
  state.subscribe(['sandbox.hand'], () => {
    const told = read(state.get('sandbox.hand'));
    if (write(told) === write(hand)) return;
    hand = told;
    bar.replaceChildren(...knobs());
    build();
  }, bar);
  bar.append(...knobs());
  build();
  return () => {};
}
