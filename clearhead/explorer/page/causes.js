/** Causes of the answer: its logit as a sum over the model's parts, and the states of another text that bring that text's answer over. */

import {isOld} from './ask.js';
import {ARROWS, barOf, button, card, colour, complain, controls, el, figure, keptChoice, liveOnly, note, quoted, ring, row, textField, visible, within} from './draw.js';

/** A token or class by its name; empty: the most likely one. @param {Page} page @param {'token' | 'against'} key */
export function targetField(page, key, label = '', usual = '') {
  const list = el('datalist', {id: `${key}-names`});
  const input = el('input', {type: 'search', list: list.id, placeholder: usual, size: Math.max(16, usual.length), autocomplete: 'off', onchange: () => page.state.set({[key]: input.value || null})});
  const fill = () => {
    if (document.activeElement !== input) input.value = page.state.get(key);
    list.replaceChildren(...[...page.reading?.answer.top ?? [], ...page.reading?.plain?.top ?? []].map(({token, label: name}) => el('option', {value: token ?? name})));
  };
  page.state.subscribe([key], fill, input);
  return {fill, node: liveOnly(el('label', {class: 'control'}, el('span', {}, label), input, list), 'sweep')};
}
/** Of the address, what a request needs. @param {State} state @param {string[]} keys */
export const named = (state, keys) => Object.fromEntries(keys.filter((key) => state.get(key)).map((key) => [key, state.get(key)]));

/** Layers down, columns across, each cell a number with a sign. @param {Box} root @param {SignedKind} kind */
function signedGrid(root, kind) {
  const high = 22;
  let at = {r: -1, c: -1}, wide = 10, left = 46, top = 22;
  const cellAt = (x = 0, y = 0) => {
    const r = Math.floor((y - top) / high), c = Math.floor((x - left) / wide);
    return r >= 0 && r < kind.rows() && c >= 0 && c < kind.columns().length ? {r, c} : null;
  };
  const drawn = figure(root, {
    label: kind.label,
    height(width) {
      const longest = Math.max(...kind.columns().map((name) => Math.min(visible(name).length, 11)), 1);
      wide = within((width - left - 8) / Math.max(1, kind.columns().length), 6, 40);
      top = longest > 2 ? 16 + longest * 6 : 22;
      return top + high * kind.rows() + 6;
    },
    draw(ink) {
      const most = kind.most();
      ink.fillStyle = colour('--soft');
      kind.columns().forEach((name, c) => {
        const word = visible(name);
        if (wide < 11 && c % 5) return;
        ink.save();
        ink.translate(left + (c + 0.5) * wide, top - 8);
        ink.textAlign = top > 22 ? 'left' : 'center';
        if (top > 22) ink.rotate(-Math.PI / 3.2);
        ink.fillText(`\u2068${word.length > 11 ? `${word.slice(0, 10)}…` : word}\u2069`, 0, 0);
        ink.restore();
      });
      ink.textAlign = 'right';
      for (let r = 0; r < kind.rows(); r++) {
        ink.fillStyle = colour('--soft');
        ink.fillText(String(r), left - 10, top + (r + 0.5) * high);
        for (let c = 0; c < kind.columns().length; c++) {
          const value = kind.value(r, c);
          const box = /** @type {const} */ ([left + c * wide + 1, top + r * high + 1, wide - 2, high - 2]);
          ink.fillStyle = colour('--sunk');
          ink.fillRect(...box);
          if (value === null) continue;
          ink.globalAlpha = within(Math.abs(value) / most);
          ink.fillStyle = colour(value < 0 ? '--warm' : '--accent');
          ink.fillRect(...box);
          ink.globalAlpha = 1;
          if (r === at.r && c === at.c) ring(ink, ...box);
        }
      }
    },
    hover(x, y) {
      const cell = cellAt(x, y);
      return cell && kind.words(cell.r, cell.c);
    },
    click(x, y) {
      const cell = cellAt(x, y);
      if (cell) choose(cell);
    },
    keys(key) {
      const step = ARROWS[key];
      if (!step || !kind.rows()) return false;
      choose({r: within(at.r + step[0], 0, kind.rows() - 1), c: within(at.c + step[1], 0, kind.columns().length - 1)});
      return true;
    },
  });
  const told = el('p', {class: 'readout', 'aria-live': 'polite'}, 'Choose a cell to read it.');
  drawn.canvas.after(told);
  /** @param {{r: number, c: number}} cell */
  function choose(cell) {
    at = cell;
    told.textContent = kind.words(cell.r, cell.c);
    drawn.redraw();
  }
  return drawn;
}
const signs = (plus = '', minus = '') => el('div', {class: 'legend'}, ...[plus, minus].map((words, i) => {
  const key = el('i');
  key.style.color = `var(--line-${i})`;
  return el('span', {}, key, words);
}));
const signed = (value = 0) => `${value < 0 ? '−' : '+'}${Math.abs(value).toFixed(3)}`;

/** @type {PanelKind['panel']} */
export function attributionPanel(root, page) {
  const {state} = page;
  const fields = [targetField(page, 'token', 'Token', 'the most likely'), targetField(page, 'against', 'Minus the logit of', 'nothing')];
  const sum = note();
  const left = card('What adds to the logit', 'The last layer’s state is a sum: the embedding, plus what each head and each feed-forward layer wrote. So the logit is a sum, too. Here is the share of each part.',
    controls(...fields.map(({node}) => node)), sum, signs('for the token', 'against it'));
  const list = el('ol', {class: 'bars signed'});
  root.append(left, card('The largest shares', 'Only what a part adds directly. If a head helps a later layer, this counts as that layer’s.', list));
  /** @type {Map<string, Part>} */
  let parts = new Map();
  /** @type {string[]} */
  let columns = [];
  let layers = 0, most = 1;
  const column = (/** @type {Part} */ {site, head}) => (site?.endsWith('feedforward') ? 'FF' : head === null ? 'bias' : `${site?.endsWith('cross') ? 'c' : ''}${head}`);
  const name = (/** @type {Part} */ part) => (part.layer === null ? part.name : part.site?.endsWith('feedforward') ? `feed-forward ${part.layer}`
    : `layer ${part.layer}, ${part.site?.endsWith('cross') ? 'cross ' : ''}${part.head === null ? 'bias' : `head ${part.head}`}`);
  const grid = signedGrid(left, {
    label: 'Shares of the logit by layer and part', rows: () => layers, columns: () => columns, most: () => most,
    value: (r, c) => parts.get(`${r}:${columns[c]}`)?.value ?? null,
    words(r, c) {
      const part = parts.get(`${r}:${columns[c]}`);
      return part ? `${name(part)}: ${signed(part.value)}` : '';
    },
  });
  function update() {
    for (const {fill} of fields) fill();
    void page.load(left, 'attribution', 'attribution', {run: page.run(), ...named(state, ['token', 'against'])}, (answer) => {
      /** @type {Part[]} */
      const all = answer.parts;
      const inside = all.filter(({layer}) => layer !== null);
      parts = new Map(inside.map((part) => [`${part.layer}:${column(part)}`, part]));
      columns = [...new Set(inside.map(column))].sort((a, b) => Number(a === 'FF') - Number(b === 'FF') || Number(a === 'bias') - Number(b === 'bias') || a.length - b.length);
      layers = Math.max(...inside.map(({layer}) => layer ?? 0)) + 1;
      const order = [...all].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
      most = Math.max(1e-9, ...inside.map(({value}) => Math.abs(value)));
      const what = answer.against === null ? `The logit of ${quoted(answer.token)}` : `The logit of ${quoted(answer.token)} minus that of ${quoted(answer.against)}`;
      sum.textContent = `${what} is ${answer.logit.toFixed(3)}. The ${all.length} parts sum to ${answer.total.toFixed(3)}.`;
      const largest = Math.abs(order[0].value) || 1;
      list.replaceChildren(...order.slice(0, 14).map((part) => {
        const [word, bar, number] = barOf(name(part), 0, {p: Math.abs(part.value) / largest});
        word.textContent = name(part);
        number.textContent = signed(part.value);
        return el('li', {class: part.value < 0 ? 'minus' : ''}, word, bar, number);
      }));
      grid.say(`${what}: most from ${name(order[0])}, ${signed(order[0].value)}.`, ['part', 'share'], order.map((part) => [name(part), signed(part.value)]));
      grid.redraw();
    });
  }
  state.subscribe(['token', 'against'], update, left);
  return update;
}

/** @type {PanelKind['panel']} */
export function patchingPanel(root, page) {
  const {state} = page;
  const {area, node} = textField('The other text, with as many tokens', 1, (second) => state.set({second}));
  area.value = state.get('second');
  const fields = [targetField(page, 'token', 'For', 'the other text’s answer'), targetField(page, 'against', 'Against', 'this text’s answer')];
  const bar = el('progress', {max: 1, value: 0, hidden: true, 'aria-label': 'Layers'});
  const stop = button('Stop', () => rest(turn + 1));
  stop.hidden = true;
  const words = note();
  const box = card('Patch in states of another text', 'Each cell is one run of the text. In it, one state is taken from the other text: that of the column’s token after the row’s layer. The colour says how far this moves the answer towards that of the other text: full colour is all the way.',
    liveOnly(node), controls(...fields.map((field) => field.node), liveOnly(keptChoice(state, 'patch.place', 'residual', 'Take', [['residual', 'whole state'], ['attention', 'attention’s output'], ['feedforward', 'feed-forward’s neurons']]))), row(stop, bar), words, signs('towards the other text’s answer', 'away from it'));
  root.append(box);
  /** @type {Numbers[]} */
  let rows = [];
  /** @type {string[]} */
  let names = [];
  let turn = 0;
  const layers = () => page.model().attentions[0].sites.length;
  const grid = signedGrid(box, {
    label: 'Share of the answer that each patch brings over', rows: () => (rows.length ? layers() : 0), columns: () => names, most: () => 1,
    value: (r, c) => rows[r]?.[c] ?? null,
    words: (r, c) => (rows[r] ? `Layer ${r}, ${quoted(names[c])}: ${(rows[r][c] * 100).toFixed(0)}% of the way` : 'not computed yet'),
  });
  function rest(next = turn) {
    turn = next;
    bar.hidden = stop.hidden = true;
  }
  async function run(mine = turn) {
    const params = {run: page.run(), other: state.get('second'), place: state.get('patch.place', 'residual'), ...named(state, ['token', 'against'])};
    bar.hidden = stop.hidden = false;
    try {
      for (let layer = 0; layer < layers(); layer++) {
        const answer = await page.ask('patches', {...params, layer}, 'patches');
        if (mine !== turn || !box.isConnected) return;
        complain(box, null);
        rows[layer] = answer.arrays.share;
        names = answer.names;
        bar.value = (layer + 1) / layers();
        words.textContent = `Logit of ${quoted(answer.token)} minus ${quoted(answer.against)}: ${answer.text.toFixed(2)} for this text, ${answer.other.toFixed(2)} for the other.`;
        tell();
        grid.redraw();
      }
    } catch (error) {
      if (mine === turn && !isOld(error)) complain(box, error);
    }
    if (mine === turn) rest();
  }
  function tell() {
    grid.node.hidden = false;
    const cells = rows.flatMap((shares, layer) => Array.from(shares, (share, c) => ({layer, share, name: names[c]}))).sort((a, b) => b.share - a.share);
    grid.say(`Layers down, tokens of the other text across. ${rows.length} of ${layers()} layers. The largest: ${quoted(cells[0].name)} at layer ${cells[0].layer}, ${(cells[0].share * 100).toFixed(0)}%.`,
      ['token', 'layer', 'share'], cells.slice(0, 20).map(({name, layer, share}) => [visible(name), layer, share.toFixed(3)]));
  }
  function update() {
    for (const {fill} of fields) fill();
    if (document.activeElement !== area) area.value = state.get('second');
    rows = [];
    grid.node.hidden = true;
    rest(turn + 1);
    complain(box, null);
    words.textContent = 'Write another text that differs in a word or two and is followed by another token.';
    if (state.get('second').trim()) void run();
  }
  state.subscribe(['token', 'against', 'patch.place'], update, box);
  return update;
}
