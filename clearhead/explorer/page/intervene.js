/** Interventions: replace a head's output by zeros, by its mean or by its output on another text; or remove each head in turn. */

import {asks, bars, button, card, complain, controls, el, keptChoice, liveOnly, note, percent, quoted, row, short, slider, tableBox, textField} from './draw.js';
import {named, targetField} from './causes.js';
import {attentionChoice, attentionOf, eachLayer, layerOf, makeGrid} from './grid.js';
import {nameOfSteering, neuronsBox, steerBox} from './neurons.js';
import {readChanges, writeChanges} from './state.js';
import {samplesOf} from './tokens.js';

const HOWS = /** @type {const} */ ({zero: 'zero', mean: 'its mean', patch: 'from another text', scale: 'times a factor', steer: ''});

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const {state} = page;
  const result = el('div', {class: 'before-after', 'aria-live': 'polite'});
  const chips = row();
  const left = card('Change heads', 'Click a head, or a whole part of a layer below, to replace its output. Click it again to undo that.');
  root.append(left, card('The answer, before and after', '', result, chips));
  const how = () => /** @type {Change['how']} */ (state.get('how', 'zero'));
  const changed = () => readChanges(state.get('changes'));
  /** @param {Change[]} changes */
  const put = (changes) => state.set({changes: writeChanges(changes) || null});
  const other = otherField(page);
  const factor = slider('Factor', [-2, 4, 0.25], state.number('by', 0.5), (by) => state.set({by}));
  const measured = targetField(page, 'token', 'Measure the loss of', page.model().head === 'classes' ? 'the class it chose' : page.model().shape === 'encoder' ? 'its answer' : 'all tokens');
  left.append(controls(attentionChoice(page), liveOnly(keptChoice(state, 'how', 'zero', 'Set to', Object.entries(HOWS).filter(([name]) => name !== 'steer'))), factor), liveOnly(other));

  /** @type {Map<string, Effect>} effects by site and head */
  let effects = new Map();
  let turn = 0;
  const grid = makeGrid(left, page, {
    label: 'Heads to change', sorts: false, filled: paint,
    pick: ({site, head}) => change([site], head),
    words({site, head}) {
      const effect = effects.get(`${site}:${head}`);
      return effect ? `zeroed: ${told(effect)}` : '';
    },
  });
  const parts = el('div', {class: 'parts'});
  left.append(parts);
  /** A row of buttons for each kind of part, a button a layer. */
  function showParts() {
    const sites = attentionOf(page).sites, forward = sites.map((site) => site.replace(/\w+$/, 'feedforward'));
    /** @type {[string, string[][]][]} */
    const kinds = [['Attention', sites.map((site) => [site])], ['Feed-forward', forward.map((site) => [site])], ['Layer', sites.map((site, i) => [site, forward[i]])]];
    const changes = changed();
    parts.replaceChildren(...kinds.map(([name, all]) => el('div', {role: 'group', 'aria-label': name, class: 'row'}, el('span', {class: 'note'}, name),
      ...all.map((some, i) => el('button', {type: 'button', class: 'quiet', 'aria-label': `${name} ${i}`, onclick: () => change(some, null),
        'aria-pressed': String(some.every((site) => changes.some(is(site, null))))}, String(i))))));
    liveOnly(parts);
  }
  /** @param {string[]} sites @param {number | null} head */
  function change(sites, head) {
    if (!asks('read')) return complain(left, 'Not in this exported page: run clearhead explore to change heads.');
    if (how() === 'patch' && !state.get('second').trim()) {
      complain(left, 'Write the other text first. The head gets its output on that text.');
      return other.querySelector('textarea')?.focus();
    }
    complain(left, null);
    const mine = (/** @type {Change} */ one) => sites.some((site) => is(site, head)(one));
    const isDone = changed().filter((one) => mine(one) && one.how === how()).length === sites.length;
    const by = how() === 'scale' ? {by: state.number('by', 0.5)} : {};
    put([...changed().filter((one) => !mine(one)), ...(isDone ? [] : sites.map((site) => ({site, head, how: how(), ...by})))]);
  }
  const bar = el('progress', {max: 1, value: 0, hidden: true, 'aria-label': 'Sweep'});
  const words = note('Sets each head to zero, one at a time, and measures how the loss changes.');
  const table = tableBox('The 20 largest changes');
  const all = button('Try every head', () => void sweep(), 'main');
  const isMeasured = page.model().can.sweep !== false;
  if (isMeasured) left.append(row(all, measured.node, bar), words, table.node);
  const neurons = neuronsBox(page, (site, neuron) => change([site], neuron)), steering = steerBox(page);
  left.append(neurons.node, steering.node);

  function paint() {
    const changes = changed();
    const most = Math.max(1e-9, ...[...effects.values()].map((effect) => Math.abs(harm(effect))));
    const found = (site = '', head = 0) => changes.find(is(site, head)) ?? changes.find(is(site, null));
    showParts();
    neurons.mark();
    steering.mark();
    grid.mark(({site, head}) => Boolean(found(site, head)));
    for (const {site, head, node} of grid.heads()) {
      const change = found(site, head);
      const effect = effects.get(`${site}:${head}`);
      node.dataset.change = change ? {zero: '0', mean: 'm', patch: 'p', scale: '×', steer: ''}[change.how] : '';
      node.dataset.effect = effect && harm(effect) < 0 ? 'better' : 'worse';
      node.style.setProperty('--effect', String(effect ? Math.abs(harm(effect)) / most : 0));
    }
    factor.hidden = how() !== 'scale';
    other.hidden = how() !== 'patch' && !changes.some((one) => one.how === 'patch');
    chips.replaceChildren(...changes.map((one) => {
      const [layer, kind] = [layerOf(one.site), one.site.replace(/.*\./, '').replace('feedforward', 'feed-forward')];
      const name = one.head === null ? `${kind} of layer ${layer}` : `layer ${layer}, ${kind === 'feed-forward' ? 'neuron' : 'head'} ${one.head}`;
      return button(`${one.how === 'steer' ? nameOfSteering(one) : `${name}: ${one.how === 'scale' ? `× ${one.by}` : HOWS[one.how]}`} ✕`, () => put(changes.filter((kept) => kept !== one)), 'quiet', `Undo ${name}`);
    }), ...(changes.length > 1 ? [button('Undo all', () => put([]))] : []));
  }
  async function sweep() {
    const mine = ++turn;
    if (!bar.hidden) return rest();
    effects = new Map();
    bar.hidden = false;
    bar.value = 0;
    all.textContent = 'Stop';
    await eachLayer(left, page, 'sweep', named(state, ['token']), () => mine === turn, (answer, layer, done) => {
      bar.value = (layer + 1) / attentionOf(page).sites.length;
      for (const effect of answer.effects) effects.set(`${effect.site}:${effect.head}`, effect);
      paint();
      if (done) tellSweep(answer.measure ?? '');
    });
    if (mine === turn) rest();
  }
  function rest() {
    bar.hidden = true;
    all.textContent = 'Try every head';
  }
  function tellSweep(measure = '') {
    const order = [...effects].sort(([, a], [, b]) => Math.abs(harm(b)) - Math.abs(harm(a)));
    const name = (at = '') => `layer ${layerOf(at)}, head ${at.split(':')[1]}`;
    const most = (/** @type {number} */ sign) => order.find(([, effect]) => sign * harm(effect) > 0);
    const [worst, best] = [most(1), most(-1)];
    words.textContent = `Bars: ${measure || 'the change without the head'}. ` +
      (worst ? `Removing ${name(worst[0])} hurts most (${told(worst[1])}). ` : 'Removing a head never hurts here. ') +
      (best ? `Removing ${name(best[0])} helps most (${told(best[1])}); bars from the right mean better.` : 'Removing a head never helps here.');
    table.show(['head', 'loss', 'logit'], order.map(([at, {d_loss, d_logit}]) => [name(at), signed(d_loss), signed(d_logit)]));
  }
  /** A sweep belongs to one text and one attention. */
  let sweptFor = '';
  /** @type {Update} */
  function update(early) {
    const {text, target, model} = page.run();
    if (sweptFor !== (sweptFor = JSON.stringify([model, text, target, attentionOf(page).name, state.get('token')]))) {
      turn++;
      effects = new Map();
      table.show([], []);
      rest();
    }
    paint();
    measured.fill();
    grid.fill();
    if (early || !page.reading) return;
    compare(result, page.reading);
    neurons.update();
  }
  state.subscribe(['changes', 'how'], paint, left);
  state.subscribe(['attention', 'token'], () => update(), left);
  return update;
}

/** Where patches come from: a text of as many tokens, or another sample. @param {Page} page */
function otherField({state, model}) {
  if (model().inputs !== 'tokens') return keptChoice(state, 'second', '', 'The other', [['', 'choose'], ...samplesOf(model())]);
  const {area, node} = textField('The other text, as many tokens as the first', 1, (second) => state.set({second}));
  area.value = state.get('second');
  return node;
}

/** @param {Box} box @param {Reading} reading */
function compare(box, {answer, plain, moved, source, target}) {
  if (!plain) return box.replaceChildren(note('Nothing is changed yet. Choose a head.'));
  if (moved) return box.replaceChildren(...movedStates(moved, (target ?? source).tokens));
  // Of both, so that what fell or rose is seen.
  const both = new Map([...plain.top.slice(0, 6), ...answer.top.slice(0, 6)].map((guess) => [guess.id, guess]));
  const chance = (/** @type {Guess[]} */ top, id = 0) => top.find((guess) => guess.id === id)?.p ?? 0;
  const side = (title = '', /** @type {Result} */ {text, top}) => el('div', {}, el('h3', {}, title), text ? el('bdi', {class: 'said'}, text)
    : bars([...both.values()].map((guess) => ({...guess, p: chance(top, guess.id)}))));
  box.replaceChildren(side('Before', plain), side('After', answer));
  if (plain.text) return box.append(note(plain.text === answer.text ? 'The text is the same.' : 'The text is another one.'));
  const [was, is] = [plain.top[0], answer.top[0]];
  if (!was || !is) return;
  const word = (/** @type {Guess} */ guess) => quoted(guess.token ?? guess.label);
  box.append(note(was.id === is.id ? `${word(was)} stays first: ${percent(was.p)} before, ${percent(is.p)} after.`
    : `${word(is)} takes the place of ${word(was)}, which falls from ${percent(was.p)} to ${percent(chance(answer.top, was.id))}.`));
}

/** A model without a head predicts nothing: what a change does is how far it turns the states.
 * @param {NonNullable<Reading['moved']>} moved @param {string[]} names */
function movedStates({mean, tokens}, names) {
  if (mean === null) return [note('The change made the model write another text, so its states are not compared.')];
  const order = tokens.map((cosine, i) => ({token: names[i], id: i, p: Math.max(0, cosine), cosine})).sort((a, b) => a.cosine - b.cosine).slice(0, 8);
  if (order[0].cosine > 1 - 1e-9) return [note('The states are the same as before.')];
  const list = bars(order);
  [...list.children].forEach((row, i) => row.lastElementChild?.replaceChildren(order[i].cosine.toFixed(3)));
  return [el('div', {}, el('h3', {}, 'States that turned most'), list), note(`Cosine of each state with the one before the change; 1 is the same direction. Of the mean of all states: ${mean.toFixed(4)}.`)];
}

const is = (site = '', /** @type {number | null} */ head = 0) => (/** @type {Change} */ change) => change.site === site && change.head === head;
/** How much worse the model gets without the head; below 0: better. @param {Effect} effect */
const harm = ({d_loss, d_logit}) => d_loss ?? -(d_logit ?? 0);
/** @param {Effect} effect */
const told = ({d_loss, d_logit}) => [d_loss != null && `loss ${signed(d_loss)}`, d_logit != null && `answer's logit ${signed(d_logit)}`].filter(Boolean).join(', ');
/** @param {number | null} [value] */
const signed = (value) => (value == null ? '–' : `${value > 0 ? '+' : value < 0 ? '−' : ''}${short(Math.abs(value))}`);
