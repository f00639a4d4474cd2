/** Generation: sampling one token at a time with what each filter removes, and beam search as a tree of what was kept and dropped. */
import {asks, barOf, button, card, colour, controls, el, figure, font, keptChoice, liveOnly, note, percent, quoted, row, short, slider, textField, visible} from './draw.js';

/** A branch's colours (inside, edge, word) and sign. */
const LOOKS = {kept: ['--tint', '--tint', '--ink', ''], finished: ['--tint', '--accent', '--ink', '■ '], dropped: ['--card', '--line', '--soft', '× ']};

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const {state} = page;
  const isPair = page.model().shape === 'encoder_decoder';
  const body = el('div', {class: 'stack'});
  /** @type {Update} */
  let inner;
  const {area, node} = textField(isPair ? 'Source' : 'Text to continue', 2, (text) => state.set({text, 'generate.written': null}));
  const beams = asks('beam') || !window.CLEARHEAD_LOCAL;
  const how = () => (beams ? state.get('generate.how', isPair ? 'beam' : 'sample') : 'sample');
  root.append(card('Write, one token at a time', 'The model gives every token a probability. You choose how one of them is taken.',
    liveOnly(node), beams ? keptChoice(state, 'generate.how', how(), 'Choose by', [['sample', 'Sampling'], ['beam', 'Beam search']])
      : note('Beam search is not in this file, which computes by itself: run clearhead explore.')), body);
  function open() {
    body.replaceChildren();
    inner = (how() === 'beam' ? beam : sample)(body, page);
    inner();
  }
  state.subscribe(['generate.how'], open, body);
  open();
  return () => {
    if (document.activeElement !== area) area.value = page.run().text;
    inner();
  };
}

/** They do nothing at their usual value. */
const FILTERS = ['top_k', 'top_p', 'min_p', 'repetition_penalty'];

/** Sliders whose numbers are kept in the address. @param {State} state @param {Knob[]} told */
function knobs(state, told) {
  const keys = told.map(([key]) => `generate.${key}`);
  return {
    keys, values: () => Object.fromEntries(told.map(([key, , , , , usual], i) => [key, state.number(keys[i], usual)])),
    sliders: told.map(([key, label, min, max, step, usual], i) => slider(label, [min, max, step], state.number(keys[i], usual),
      (value) => state.set({[keys[i]]: value === usual ? null : value}), (value = 0) => (FILTERS.includes(key) && value === usual ? 'off' : String(value)))),
  };
}

/** @type {PanelKind['panel']} */
function sample(root, page) {
  const {state} = page;
  /** @type {number | null} none while it is drawn */
  let drawn = null;
  const written = () => state.get('generate.written').split(',').filter(Boolean).map(Number);
  /** @param {number[]} ids */
  const put = (ids) => state.set({'generate.written': ids.join(',') || null});
  const story = el('p', {class: 'said so-far', dir: 'auto', role: 'status'});
  const told = note();
  const list = el('ol', {class: 'chances', 'aria-label': 'The likeliest next tokens; press one to take it'});
  const back = button('Step back', () => put(written().slice(0, -1)), 'quiet');
  const restart = button('Start again', () => put([]), 'quiet');
  const knob = knobs(state, [['temperature', 'Temperature', 0.1, 2, 0.05, 1], ['top_k', 'Top-k', 0, 40, 1, 0], ['top_p', 'Top-p', 0.05, 1, 0.05, 1],
    ['min_p', 'Min-p', 0, 0.5, 0.01, 0], ['repetition_penalty', 'Repetition penalty', 1, 2, 0.05, 1]]);
  const box = card('The next token', '', told, list);
  root.append(el('div', {class: 'sampling'}, el('div', {class: 'stack'},
    card('So far', '', story, liveOnly(row(button('Take the drawn token', () => drawn !== null && put([...written(), drawn]), 'main'),
      button('Draw again', () => state.set({'generate.seed': state.number('generate.seed', 0) + 1}), 'quiet'), back, restart))),
    card('How it is chosen', 'The temperature sharpens or flattens the probabilities, the filters remove unlikely tokens, and one of the rest is drawn at random. In the list, the outline is the probability before this, the filled bar after it.',
      liveOnly(el('div', {class: 'knobs'}, ...knob.sliders)))), box));

  function update() {
    const [ids, run] = [written(), page.run()];
    const params = {run, ids, ...knob.values(), seed: state.number('generate.seed', 0)};
    drawn = null;
    if (asks('step')) back.disabled = restart.disabled = !ids.length;
    void page.load(box, 'step', 'step', params, (answer) => {
      /** @type {Choice[]} */
      const top = answer.top;
      drawn = answer.drawn;
      const one = top.find(({id}) => id === drawn);
      story.replaceChildren(el('span', {class: 'was-there'}, page.model().shape === 'decoder' ? run.text : ''),
        ids.length ? el('bdi', {class: 'new'}, answer.text) : '', el('bdi', {class: 'drawn'}, visible(answer.drawn_token)));
      told.textContent = `Drawn: ${quoted(answer.drawn_token)}${one ? ` (probability ${percent(one.p_final)})` : ''}, from ${short(answer.kept)} tokens that the filters left.${answer.is_end ? ' It ends the text.' : ''}`;
      const most = Math.max(...top.flatMap(({p_raw, p_final}) => [p_raw, p_final]));
      list.replaceChildren(...top.slice(0, 24).map(({id, token, p_raw, p_final, removed_by: by}) => {
        const fate = by ? 'gone' : id === drawn ? 'drawn' : '';
        return el('li', {class: fate}, el('button', {type: 'button', disabled: !asks('step'), title: `before: ${percent(p_raw)}`, onclick: () => put([...ids, id])},
          ...barOf(token, p_final, {raw: p_raw / most, p: p_final / most}), el('small', {}, by ? by.replace('_', '-') : fate)));
      }));
    });
  }
  state.subscribe([...knob.keys, 'generate.seed', 'generate.written'], update, box);
  return update;
}

/** @type {PanelKind['panel']} */
function beam(root, page) {
  const {state} = page;
  const pitch = 118, wide = 96, high = 34, left = 8, top = 46;
  /** @type {Leaf[]} */
  let leaves = [];
  /** @type {Leaf | null} */
  let chosen = null;
  let steps = 0, slots = 1;
  const knob = knobs(state, [['beams', 'Beams', 2, 8, 1, 3], ['length_penalty', 'Length penalty', 0, 2, 0.1, 1], ['most', 'At most, in tokens', 2, 40, 1, 16]]);
  const box = card('Beam search', 'At each step every beam is extended by every token, and the best few of all these texts are kept. Filled: the text that won; ×: dropped; ■: finished.',
    liveOnly(controls(...knob.sliders)));
  const results = el('ol', {class: 'results'});
  const word = el('p', {class: 'working', role: 'status'});
  root.append(box, card('What it found', 'Score: log-probability divided by length to the power of the penalty. Nearer to 0 is better.', results));
  const tree = figure(box, {
    label: 'The tree of beam search; arrow keys move through it', height: () => top + slots * high,
    draw(ink) {
      ink.fillStyle = colour('--soft');
      for (let at = 0; at < steps; at++) ink.fillText(`step ${at + 1}`, left + at * pitch, 12);
      for (const leaf of [...leaves].sort((a, b) => weight(a) - weight(b))) stem(ink, leaf);
      for (const leaf of leaves) paint(ink, leaf);
    },
    hover(x, y) {
      const leaf = find(x, y);
      return leaf && tell(leaf);
    },
    click: (x, y) => choose(find(x, y)),
    keys(key) {
      if (!/^Arrow/.test(key) || !leaves.length) return false;
      const at = chosen ?? leaves[0];
      const beside = leaves.filter(({step}) => step === at.step);
      const ways = leaves.filter(({before}) => before === at);
      const next = {ArrowLeft: at.before, ArrowRight: ways.find(({wins}) => wins) ?? ways[0], ArrowDown: beside[beside.indexOf(at) + 1], ArrowUp: beside[beside.indexOf(at) - 1]}[key];
      choose(chosen && next ? next : at);
      return true;
    },
  });
  const sideways = el('div', {class: 'sideways'});
  tree.canvas.replaceWith(sideways, word);
  sideways.append(tree.canvas);

  /** @param {Leaf} leaf */
  const weight = ({wins, fate}) => (wins ? 2 : fate === 'dropped' ? 0 : 1);
  /** @param {Ink} ink @param {Leaf} leaf */
  function stem(ink, leaf) {
    const {before, x, y} = leaf;
    if (!before) return;
    const start = before.x + wide;
    ink.strokeStyle = colour(['--line', '--edge', '--accent'][weight(leaf)]);
    ink.lineWidth = leaf.wins ? 3 : 1.25;
    ink.beginPath();
    ink.moveTo(start, before.y);
    ink.bezierCurveTo((start + x) / 2, before.y, (start + x) / 2, y, x, y);
    ink.stroke();
  }
  /** @param {Ink} ink @param {Leaf} leaf */
  function paint(ink, leaf) {
    const {x, y, fate, wins} = leaf;
    ink.beginPath();
    ink.roundRect(x, y - 12, wide, 24, fate === 'finished' ? 12 : 6);
    const [inside, edge, word, sign] = LOOKS[fate];
    ink.fillStyle = colour(wins ? '--accent' : inside);
    ink.fill();
    ink.lineWidth = leaf === chosen ? 2.5 : 1;
    ink.strokeStyle = colour(leaf === chosen ? '--warm' : edge);
    ink.stroke();
    ink.save();
    ink.clip();
    ink.font = font(12.5, wins ? 600 : 400);
    ink.fillStyle = colour(wins ? '--on-accent' : word);
    ink.fillText(`${sign}\u2068${visible(leaf.token)}\u2069`, x + 8, y + 1);
    ink.restore();
  }
  const find = (x = 0, y = 0) => leaves.find((leaf) => x >= leaf.x && x <= leaf.x + wide && Math.abs(y - leaf.y) <= 14) ?? null;
  /** @param {Leaf} leaf */
  const tell = ({token, step, score, fate, why}) => `${quoted(token)} at step ${step + 1}, score ${score?.toFixed(3)}: ${fate}${why ? `, ${why}` : ''}.`;
  /** @param {Leaf} leaf @returns {string} */
  const way = ({before, token}) => `${before ? way(before) + ' ' : ''}${quoted(token)}`;
  /** @param {Leaf | null} leaf */
  function choose(leaf) {
    chosen = leaf;
    word.textContent = leaf ? `${way(leaf)}. ${tell(leaf)}` : 'Choose a branch to read why it was kept or dropped.';
    if (leaf) sideways.scrollTo({left: leaf.x - sideways.clientWidth / 2});
    tree.redraw();
  }

  function update() {
    const set = knob.values();
    void page.load(box, 'beam', 'beam', {run: page.run(), ...set}, (answer) => {
      grow(answer.steps, set.beams);
      sideways.style.setProperty('--wide', `${steps * pitch}px`);
      choose(null);
      const dead = leaves.filter(({fate}) => fate === 'dropped').length;
      tree.say(`${steps} steps with ${set.beams} beams: ${leaves.length - dead} branches were kept, ${dead} of the next best were dropped.${answer.stopped ? ` It stopped because ${answer.stopped}.` : ''}`,
        ['step', 'token', 'after', 'score', 'fate'], leaves.map(({step, token, before, score, fate, why}) => [step + 1, visible(token), before ? visible(before.token) : '', score?.toFixed(3) ?? '', why ?? fate]));
      results.replaceChildren(...answer.result.map((/** @type {{text: string, score: number}} */ one) =>
        el('li', {}, el('span', {class: 'said', dir: 'auto'}, one.text || '(nothing)'), ' ', el('small', {}, one.score.toFixed(3)))));
    });
  }
  /** @param {{alive: Branch[], died: Branch[], done: Branch[]}[]} told */
  function grow(told, beams = 0) {
    [leaves, steps, slots] = [[], told.length, 1];
    /** @type {Leaf[]} */
    let before = [];
    told.forEach(({alive, died, done}, step) => {
      /** @param {Branch[]} some @param {Leaf['fate']} fate @returns {Leaf[]} */
      const made = (some, fate) => some.map((one) => ({...one, step, fate, before: before[one.parent] ?? null, x: left + step * pitch, y: 0}));
      const kept = made(alive, 'kept');
      const all = [...kept, ...made(done, 'finished'), ...made(died.filter(({score}) => score !== null).slice(0, beams), 'dropped')];
      all.forEach((leaf, i) => (leaf.y = top + i * high));
      slots = Math.max(slots, all.length);
      leaves.push(...all);
      before = kept;
    });
  }
  state.subscribe(knob.keys, update, box);
  return update;
}
