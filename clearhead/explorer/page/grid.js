/** Heads as thumbnails, layers down and heads across, filled in layer by layer; an ARIA grid with one tab stop. */

import {isOld} from './ask.js';
import {ARROWS, bitmap, choice, complain, el, rove, tip, watch} from './draw.js';

/** @type {{[name: string]: string}} */
export const SCORES = {
  layer: 'layer', previous: 'previous token', first: 'first token', induction: 'induction', entropy: 'focus (low entropy)', alignment: 'alignment',
};

/** Whether heads of this model can be ordered by a score. Patches and frames are no tokens: none repeats, and the first is no start.
 * @param {Page} page */
export function hasScore(page, name = '') {
  const {shape, inputs} = page.model();
  if (name === 'alignment') return shape === 'encoder_decoder';
  return name === 'layer' || name === 'entropy' || inputs === 'tokens' || shape === 'encoder_decoder';
}

/** The attention whose heads are shown. Where there is cross-attention it tells most.
 * @param {Page} page */
export function attentionOf(page) {
  const {attentions} = page.model();
  const name = page.state.get('attention', 'cross');
  return attentions.find((one) => one.name === name) ?? attentions[0];
}

export const layerOf = (site = '') => Number(/\.(\d+)\./.exec(`.${site}.`)?.[1] ?? 0);

/** @param {Page} page */
export function attentionChoice(page) {
  const {attentions} = page.model();
  return attentions.length < 2 ? null : choice('Attention', attentions.map(({name}) => name), attentionOf(page).name,
    (attention) => page.state.set({attention, site: null, head: null}));
}

/** Ask the same of every layer in turn, for as long as it `goesOn`; what fails is said in `root`.
 * @param {Box} root @param {Page} page @param {() => boolean} goesOn @param {(answer: Answer, layer: number, done: boolean) => void} show */
export async function eachLayer(root, page, name = '', params = {}, goesOn, show) {
  const run = page.run(), {name: attention, sites} = attentionOf(page);
  try {
    for (let layer = 0; layer < sites.length; layer++) {
      const answer = await page.ask(name, {run, attention, layer, ...params}, name);
      if (!goesOn() || !root.isConnected) return;
      show(answer, layer, layer === sites.length - 1);
      // Answers kept from before come all at once; a layer a frame keeps each frame short.
      await new Promise(requestAnimationFrame);
      if (!goesOn()) return;
    }
    complain(root, null);
  } catch (error) {
    if (goesOn() && !isOld(error)) complain(root, error);
  }
}

/** @param {Box} root @param {Page} page @param {GridKind} told */
export function makeGrid(root, page, told) {
  /** @type {Head[]} */
  let heads = [];
  /** @type {Box[][]} */
  let rows = [];
  let turn = 0, made = '', filling = '';

  /** @param {EventTarget | null} target */
  const found = (target) => heads.find(({node}) => node.contains(/** @type {Node} */ (target)));
  const grid = el('div', {
    role: 'grid', class: 'headgrid', 'aria-label': told.label, onpointerleave: () => tip(null),
    onclick({target}) {
      const head = found(target);
      if (head) told.pick(head);
    },
    onpointermove({target, clientX, clientY}) {
      const head = found(target);
      tip(head ? words(head) : null, clientX, clientY);
    },
    onkeydown(event) {
      const from = found(event.target)?.node;
      const r = rows.findIndex((row) => from && row.includes(from));
      if (!from || r < 0) return;
      const c = rows[r].indexOf(from);
      const step = {...ARROWS, Home: [0, -c], End: [0, rows[r].length - 1 - c]}[event.key];
      if (event.key === 'Enter' || event.key === ' ') from.click();
      else if (!step) return;
      else rove(grid, rows[r + step[0]]?.[c + step[1]]);
      event.preventDefault();
    },
  });
  root.append(grid);
  /** @param {Head} head */
  function words(head) {
    const scores = Object.entries(head.scores ?? {}).filter(([name, value]) => name in SCORES && hasScore(page, name) && value !== null)
      .map(([name, value]) => (name === 'entropy' ? `entropy ${Number(value).toFixed(2)} nats` : `${SCORES[name]} ${Number(value).toFixed(2)}`));
    return [`Layer ${head.layer}, head ${head.head}`, told.words?.(head) ?? '', ...scores].filter(Boolean).join('\n');
  }
  /** @param {Head} head */
  const rank = (head, score = '') => (score === 'entropy' ? -(head.scores?.entropy ?? Infinity) : head.scores?.[score] ?? -Infinity);

  const order = () => {
    const sort = told.sorts ? page.state.get('sort', 'layer') : 'layer';
    return hasScore(page, sort) ? sort : 'layer';
  };

  function build() {
    const attention = attentionOf(page);
    const key = page.model().name + attention.name;
    if (made === key) return;
    made = key;
    heads = attention.sites.flatMap((site, layer) => Array.from({length: attention.n_heads[layer]}, (_, head) => {
      const node = el('div', {role: 'gridcell', class: 'head', tabindex: '-1', 'aria-selected': 'false'}, el('img', {alt: ''}));
      return {site, layer, head, scores: null, node};
    }));
    grid.classList.toggle('compact', attention.sites.length > 12);
    grid.style.setProperty('--most', String(Math.max(...attention.n_heads)));
    arrange();
  }
  /** Layers as rows, or all heads in the order of a score. */
  function arrange() {
    const sort = order();
    const across = Math.max(...heads.map(({head}) => head)) + 1;
    const inOrder = sort === 'layer' ? heads : [...heads].sort((a, b) => rank(b, sort) - rank(a, sort));
    rows = [];
    inOrder.forEach((head, i) => {
      const r = sort === 'layer' ? head.layer : Math.floor(i / across);
      (rows[r] ??= []).push(head.node);
    });
    // In a compact grid there is no room for the score: pointing at the head tells it.
    const isCompact = grid.classList.contains('compact');
    for (const head of heads) head.node.dataset.score = sort === 'layer' || head.scores?.[sort] == null ? '' : `${head.layer}.${head.head}${isCompact ? '' : `  ${Number(head.scores[sort]).toFixed(2)}`}`;
    grid.classList.toggle('sorted', sort !== 'layer');
    grid.replaceChildren(...rows.map((row, r) => el('div', {role: 'row'}, el('span', {role: 'rowheader'}, sort === 'layer' ? String(r) : ''), ...row)));
    mark();
  }
  /** Which heads are chosen, and what each is called. @param {(head: Head) => boolean} [chosen] */
  function mark(chosen = () => false) {
    for (const head of heads) {
      head.node.setAttribute('aria-selected', String(chosen(head)));
      head.node.setAttribute('aria-label', words(head).replaceAll('\n', ', '));
    }
    if (!grid.querySelector('.head[tabindex="0"]')) (heads.find(chosen) ?? heads[0])?.node.setAttribute('tabindex', '0');
  }
  /** As a plain picture: browsers give every canvas a layer of its own, and 144 layers make each frame slow.
   * @param {Head} head @param {Uint8Array} thumbs @param {number[]} shape */
  function draw(head, thumbs, [, height, width]) {
    const shown = /** @type {HTMLImageElement} */ (head.node.firstChild);
    const at = head.head * width * height;
    const paint = () => void (shown.src = bitmap(thumbs.subarray(at, at + width * height), height, width, (value) => value / 255).toDataURL());
    paint();
    watch(shown, paint);
    head.node.classList.add('here');
  }
  /** Begun before the tokens are read, it goes on when they are here. */
  function fill() {
    const asked = JSON.stringify([page.run(), attentionOf(page).name]);
    if (filling === (filling = asked)) return;
    const mine = ++turn;
    build();
    void eachLayer(root, page, 'grid', {size: 32}, () => mine === turn, (answer, layer, done) => {
      for (const score of answer.scores) {
        const head = heads.find((one) => one.layer === layer && one.head === score.head);
        if (!head) continue;
        head.scores = score;
        draw(head, /** @type {Uint8Array} */ (answer.arrays.thumbs), answer.shapes.thumbs);
      }
      if (done && order() !== 'layer') arrange();
      told.filled?.(heads, done);
    });
  }
  return {fill, arrange, mark, heads: () => heads, first: () => (order() === 'layer' ? null : heads.reduce((a, b) => (rank(b, order()) > rank(a, order()) ? b : a)))};
}
