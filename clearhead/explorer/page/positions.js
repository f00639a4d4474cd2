/** How a model knows the order of its tokens: each kind drawn, and how similar two positions are at each distance. */
import {bitmap, card, chart, colour, controls, el, extent, figure, keptChoice, liveOnly, short, slider, within} from './draw.js';

const LEFT = 30, BELOW = 24, APART = [1, 2, 4, 8, 16, 32];

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const {state} = page;
  /** @type {Answer | null} */
  let answer = null;
  const view = () => state.get('positions.view', 'similarity');
  const box = card('Position encodings', 'Without them attention does not know the order of tokens. Each kind below tells the model where a token is, in its own way.');
  const curve = chart(box, 'Similarity of two positions by their distance, a line for each kind');
  const gallery = el('div', {class: 'gallery'});
  root.append(box, el('div', {class: 'stack'}, controls(
    keptChoice(state, 'positions.view', 'similarity', 'Draw', [['similarity', 'Similarity of positions'], ['table', 'The numbers themselves']]),
    liveOnly(slider('Positions', [8, 128, 8], state.number('positions.length', 64), (length) => state.set({'positions.length': length})), 'positions')), gallery));

  function update() {
    const params = {model: page.run().model, length: state.number('positions.length', 64)};
    void page.load(box, 'positions', 'positions', params, (news) => {
      answer = news;
      show();
    });
  }
  function show() {
    if (!answer) return;
    const {arrays, shapes} = answer;
    const kinds = /** @type {Positions[]} */ (answer.kinds).sort((a, b) => Number(b.is_model) - Number(a.is_model));
    /** @param {Positions} kind */
    const line = ({name}) => Array.from(arrays[`${name}.bydistance`]);
    curve.show({x: {label: 'distance in tokens'}, y: {label: 'similarity, 1 = the same position'},
      series: kinds.map((kind) => ({name: kind.name, x: [...line(kind).keys()], y: line(kind), dash: !kind.is_model}))});
    curve.say(`This model’s kind is ${kinds[0].name}: ${kinds[0].words}.`, ['kind', ...APART.map((d) => `${d} apart`)],
      kinds.map((kind) => [kind.name, ...APART.map((d) => line(kind)[d]?.toFixed(3) ?? '')]));
    gallery.replaceChildren(...kinds.map((kind) => {
      const part = `${kind.name}.${view()}` in arrays ? view() : 'similarity';
      const key = `${kind.name}.${part}`;
      return draw(kind, part, arrays[key], shapes[key], line(kind));
    }));
  }
  state.subscribe(['positions.length'], update, box);
  state.subscribe(['positions.view'], show, box);
  return update;
}

/** @param {Positions} kind @param {string} part @param {Answer['arrays'][string]} values @param {number[]} shape @param {number[]} line */
function draw({name, is_model, words}, part, values, [rows, cols], line) {
  const one = card(name, `${words[0].toUpperCase()}${words.slice(1)}.`);
  if (is_model) one.firstElementChild?.append(' ', el('small', {class: 'badge'}, 'this model'));
  const [low, high] = extent(values);
  const across = part === 'table' ? 'number' : 'position';
  const made = figure(one, {
    label: `${name}: ${part === 'table' ? 'the numbers of each position' : 'similarity of each pair of positions'}`, height: (width) => (part === 'table' ? 240 : Math.min(width, 340)),
    draw(ink, width, height) {
      const [w, h] = [width - LEFT, height - BELOW];
      ink.imageSmoothingEnabled = false;
      ink.drawImage(bitmap(values, rows, cols, (x) => (x - low) / (high - low || 1)), LEFT, 0, w, h);
      ink.fillStyle = colour('--soft');
      ink.textAlign = 'right';
      for (const row of [0, rows >> 1, rows - 1]) ink.fillText(String(row), LEFT - 6, within(((row + 0.5) / rows) * h, 7, h - 7));
      ink.textAlign = 'center';
      for (const col of [0, cols >> 1, cols - 1]) ink.fillText(String(col), Math.min(width - 12, LEFT + ((col + 0.5) / cols) * w), h + 14);
    },
    hover(x, y) {
      const {clientWidth: width, clientHeight: height} = made.canvas;
      const [i, j] = [Math.floor((y / (height - BELOW)) * rows), Math.floor(((x - LEFT) / (width - LEFT)) * cols)];
      return j >= 0 && i < rows && j < cols ? `position ${i}, ${across} ${j}: ${short(values[i * cols + j])}` : null;
    },
  });
  made.say(`Down: positions. Across: ${across}s. No colour is ${short(low)}, the full colour ${short(high)}.`, ['distance', 'similarity'], line.map((x, d) => [d, x.toFixed(4)]));
  return one;
}
