/** The logit lens: the model's head applied after each layer, as if it were the last; drawn only where it is seen. */

import {ARROWS, bars, card, colour, controls, el, figure, inkOn, keptChoice, note, percent, quoted, ring, shadeOf, tip, visible, within} from './draw.js';

const WIDE = 78, HIGH = 28, LEFT = 46, TOP = 30, PIECE = 256;

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const left = card('The prediction after each layer', 'Down: layers. Across: positions. Each cell is what the model would predict if it stopped after that layer; the top row is before the first layer.');
  const what = page.model().head === 'classes' ? 'class' : 'token';
  const right = card('One cell', `Choose a cell to see what is likeliest there.`);
  const top = el('div', {class: 'cell-top', 'aria-live': 'polite'});
  right.append(top);
  root.append(left, right);
  /** Pieces of positions, asked for when they come into view. @type {Map<number, Answer | null>} */
  let pieces = new Map();
  let T = 0, layers = 1, opened = 0;
  let at = {layer: -1, position: 0};
  const wide = el('div', {class: 'lens-wide'});
  const scroller = el('div', {class: 'lens-scroll'}, wide);
  left.append(scroller);
  const drawn = figure(wide, {
    label: 'Likeliest token by layer and position',
    height: () => TOP + HIGH * layers + 4,
    draw, keys,
    hover(x, y) {
      const cell = cellAt(x, y);
      const found = cell && known(cell.layer, cell.position);
      return found && `${where()} ${place(cell.position)}, ${layerName(cell.layer)}:\n${quoted(found.token)} at ${percent(found.p)}; ${quoted(found.of)} has rank ${found.rank}`;
    },
    click(x, y) {
      const cell = cellAt(x, y);
      if (cell) choose(cell);
    },
  });
  left.append(drawn.caption);
  drawn.controls.remove();
  scroller.before(controls(keptChoice(page.state, 'lens.by', 'p', 'Colour', [['p', 'probability'], ['rank', what === 'class' ? 'rank of the final class' : 'rank of the actual token']])));
  scroller.addEventListener('scroll', () => {
    tip(null);
    drawn.redraw();
  });

  /** What is known of one cell; null while its piece is on its way. */
  function known(layer = 0, position = 0) {
    const piece = pieces.get(Math.floor(position / PIECE));
    if (!piece) return null;
    const i = position % PIECE, at = layer * piece.T + i;
    return {token: piece.tokens[layer][i], p: piece.arrays.p[at], rank: piece.arrays.rank[at], of: piece.of?.[i] ?? ''};
  }
  function want(number = 0) {
    if (pieces.has(number)) return;
    pieces.set(number, null);
    const mine = pieces;
    void page.load(left, `lens${number}`, 'lens', {run: page.run(), first: number * PIECE, n: PIECE}, (told) => {
      if (pieces !== mine) return;
      pieces.set(number, told);
      [T, layers] = [told.total ?? told.T, told.layers];
      wide.style.width = `${LEFT + WIDE * T + 4}px`;
      drawn.redraw();
      if (number !== opened) return;
      describe(told);
      choose({layer: Math.min(page.state.number('lens.layer', layers - 1), layers - 1), position: Math.min(start(), T - 1)});
      bringIntoView();
    });
  }
  /** The cell it opens on: the one of the address, else the one whose prediction stands above the panel. */
  const start = () => page.state.number('lens.position', page.model().head === 'classes' ? 0 : page.reading?.answer.at ?? (page.reading?.[side()]?.tokens.length ?? 1) - 1);
  function cellAt(x = 0, y = 0) {
    const [layer, position] = [Math.floor((y - TOP) / HIGH), Math.floor((x - LEFT + scroller.scrollLeft) / WIDE)];
    return x >= LEFT && layer >= 0 && layer < layers && position >= 0 && position < T ? {layer, position} : null;
  }
  const token = (position = 0) => page.reading?.[side()]?.tokens[position] ?? '';
  /** A model of classes has one answer for the whole input; an encoder predicts at a token, all others the one after it. */
  const where = () => (page.model().head === 'classes' ? 'Of' : page.model().shape === 'encoder' ? 'At' : 'After');
  const place = (position = 0) => (page.model().head === 'classes' ? 'the whole input' : quoted(token(position)));
  const side = () => (page.reading?.target ? 'target' : 'source');
  const layerName = (layer = 0) => (layer === 0 ? 'before the first layer' : layer === layers - 1 ? 'at the end' : `after layer ${layer - 1}`);

  /** @param {Ink} ink */
  function draw(ink, width = 0, height = 0) {
    const shift = scroller.scrollLeft;
    const [from, to] = [Math.max(0, Math.floor(shift / WIDE)), Math.min(T, Math.ceil((shift + width) / WIDE))];
    const byRank = page.state.get('lens.by', 'p') === 'rank';
    ink.save();
    ink.beginPath();
    ink.rect(LEFT, 0, width - LEFT, height);
    ink.clip();
    ink.textAlign = 'left';
    for (let position = from; position < to; position++) {
      const x = LEFT + position * WIDE - shift;
      want(Math.floor(position / PIECE));
      ink.fillStyle = colour('--soft');
      fit(ink, page.model().head === 'classes' ? 'all' : token(position), x + 6, TOP / 2);
      for (let layer = 0; layer < layers; layer++) {
        const cell = known(layer, position);
        if (!cell) break;
        const value = byRank ? 1 / (1 + Math.log2(Math.max(1, cell.rank))) : cell.p;
        const y = TOP + layer * HIGH;
        ink.fillStyle = shadeOf(value);
        ink.fillRect(x + 1, y + 1, WIDE - 2, HIGH - 2);
        ink.fillStyle = inkOn(value);
        fit(ink, cell.token, x + 7, y + HIGH / 2);
        if (layer !== at.layer || position !== at.position) continue;
        ring(ink, x + 1, y + 1, WIDE - 2, HIGH - 2);
      }
    }
    ink.restore();
    ink.fillStyle = colour('--soft');
    ink.textAlign = 'right';
    for (let layer = 0; layer < layers; layer++) ink.fillText(layer === 0 ? 'input' : layer === layers - 1 ? 'end' : String(layer - 1), LEFT - 10, TOP + (layer + 0.5) * HIGH);
  }
  function keys(key = '') {
    const step = ARROWS[key];
    if (!step || !T) return false;
    choose({layer: within(at.layer + step[0], 0, layers - 1), position: within(at.position + step[1], 0, T - 1)});
    bringIntoView();
    return true;
  }
  function bringIntoView() {
    const x = at.position * WIDE;
    if (x < scroller.scrollLeft) scroller.scrollLeft = x;
    else if (x + WIDE + LEFT > scroller.scrollLeft + scroller.clientWidth) scroller.scrollLeft = x + WIDE + LEFT - scroller.clientWidth;
  }
  /** @param {{layer: number, position: number}} cell */
  function choose(cell) {
    at = cell;
    page.state.set({'lens.layer': cell.layer, 'lens.position': cell.position});
    page.focus({side: side(), at: cell.position});
    drawn.redraw();
    void page.load(right, 'cell', 'cell', {run: page.run(), layer: cell.layer, position: cell.position, k: 10}, (told) => {
      top.replaceChildren(el('h3', {}, `${where()} ${place(cell.position)}, ${layerName(cell.layer)}`), bars(told.top),
        note(`${quoted(told.of)} has rank ${told.rank}.`));
    });
  }
  /** @param {Answer} piece the one it opens on */
  function describe({T: many, first, tokens, arrays}) {
    const last = layers - 1;
    let settled = 0;
    for (let i = 0; i < many; i++) {
      let layer = last;
      while (layer > 0 && tokens[layer - 1][i] === tokens[last][i]) layer--;
      settled += layer;
    }
    const p = (i = 0) => arrays.p[last * many + i];
    const sure = Array.from({length: many}, (_, i) => i).sort((a, b) => p(b) - p(a));
    const mean = `${(settled / many).toFixed(many > 1 ? 1 : 0)} of ${last} layers`;
    drawn.say(many > 1 ? `${last} layers, ${T} positions. On average${many < T ? ` of the first ${many} positions` : ''}, the likeliest ${what} no longer changes after ${mean}.` : `The likeliest ${what} no longer changes after ${mean}.`,
      [where().toLowerCase(), 'final prediction', 'p', `rank of the ${what === 'class' ? 'final class' : 'actual token'}`],
      sure.slice(0, 20).map((i) => [place(first + i), visible(tokens[last][i]), percent(p(i)), arrays.rank[last * many + i]]));
  }
  page.state.subscribe(['lens.by'], drawn.redraw, left);
  return () => {
    pieces = new Map();
    opened = Math.floor(start() / PIECE);
    want(opened);
  };
}

/** @param {Ink} ink */
function fit(ink, token = '', x = 0, y = 0) {
  const word = visible(token);
  ink.fillText(`\u2068${word.length > 9 ? `${word.slice(0, 8)}…` : word}\u2069`, x, y, WIDE - 12);
}
