/** Geometry: the angles between a model's tokens beside those of random directions, nearest tokens, and a flat view. */
import {has} from './ask.js';
import {showStats} from './cost.js';
import {ARROWS, axis, bars, card, chart, colour, el, figure, font, liveOnly, note, quoted, ring, short, visible} from './draw.js';

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const {state} = page;
  const model = page.model().name;
  const angles = card('Angles between tokens', 'Each token’s embedding is a direction. Random directions in many dimensions are nearly at right angles. The curves compare this model’s tokens with them.');
  const curve = chart(angles, 'Angles between pairs of tokens, and of random directions', 280);
  const bounds = el('dl', {class: 'stats'});
  angles.append(bounds);
  const input = el('input', {type: 'search', id: 'geometry-word', autocomplete: 'off', dir: 'auto'});
  const list = el('div', {class: 'stack'});
  const known = (token = '') => has('neighbours', {model, token, k: 12});
  const pick = (token = '') => known(token) && state.set({'geometry.word': token});
  const near = card('Nearest tokens', '', liveOnly(el('form', {class: 'row', onsubmit: (event) => {
    event.preventDefault();
    pick(input.value);
  }}, el('label', {for: 'geometry-word', class: 'note'}, 'Token'), input, el('button', {type: 'submit'}, 'Find')), 'neighbours'), list);
  const flat = card('In two dimensions', 'The two directions in which embeddings differ most (PCA). Tokens that are close here may be far apart in the other dimensions.');
  const word = el('p', {class: 'readout', role: 'status'});
  root.append(angles, el('div', {class: 'columns'}, near, flat));

  /** @type {string[]} */
  let tokens = [];
  /** @type {Numbers} */
  let xy = [];
  /** @type {string[]} the chosen token, then those near it */
  let named = [];
  /** @type {[number, number][]} */
  let places = [];
  let at = -1;
  const map = figure(flat, {
    label: 'Tokens in two dimensions', height: (width) => Math.min(440, Math.max(280, width * 0.75)),
    draw(ink, width, height) {
      const x = axis(tokens.map((_, i) => xy[2 * i]), {}, 14, width - 14);
      const y = axis(tokens.map((_, i) => xy[2 * i + 1]), {}, height - 14, 14);
      places = tokens.map((_, i) => [x.to(xy[2 * i]), y.to(xy[2 * i + 1])]);
      ink.fillStyle = colour('--line-0');
      ink.globalAlpha = tokens.length > 400 ? 0.4 : 0.75;
      for (const [px, py] of places) ink.fillRect(px - 1.5, py - 1.5, 3, 3);
      ink.globalAlpha = 1;
      /** @type {[number, number, number][]} where names stand already */
      const taken = [];
      named.forEach((token, rank) => {
        const place = places[tokens.indexOf(token)];
        if (!place) return;
        const [px, py] = place;
        ink.font = font(12.5, rank ? 400 : 700);
        ink.fillStyle = colour(rank ? '--ink' : '--warm');
        ink.fillRect(px - 3, py - 3, 6, 6);
        const words = `\u2068${visible(token)}\u2069`;
        const wide = ink.measureText(words).width;
        const left = px + wide + 10 > width ? px - wide - 8 : px + 8;
        if (taken.some(([from, to, at]) => left < to && left + wide > from && Math.abs(at - py) < 14)) return;
        taken.push([left, left + wide, py]);
        ink.fillText(words, left, py);
      });
      if (places[at]) ring(ink, places[at][0] - 7, places[at][1] - 7, 14, 14);
    },
    hover(x, y) {
      const found = find(x, y);
      return found === null ? null : quoted(found);
    },
    click(x, y) {
      const found = find(x, y);
      if (found !== null) pick(found);
    },
    keys(key) {
      if (key === 'Enter' && tokens[at]) pick(tokens[at]);
      else if (!ARROWS[key] || !places.length) return false;
      else {
        at = at < 0 ? Math.max(0, tokens.indexOf(named[0])) : beside(ARROWS[key]);
        word.textContent = `${quoted(tokens[at])}; Enter chooses it.`;
        map.redraw();
      }
      return true;
    },
  });
  map.canvas.after(word);
  /** The nearest point that way, within a quarter turn. @param {[number, number]} step */
  function beside([down, across]) {
    const [x, y] = places[at];
    const far = places.map(([px, py]) => {
      const [ahead, aside] = [(px - x) * across + (py - y) * down, Math.abs((px - x) * down + (py - y) * across)];
      return ahead > 0.5 && aside <= ahead ? ahead + aside : Infinity;
    });
    const least = Math.min(...far);
    return least < Infinity ? far.indexOf(least) : at;
  }
  function find(x = 0, y = 0) {
    const far = places.map(([px, py]) => Math.hypot(px - x, py - y));
    const least = Math.min(...far);
    return least < 12 ? tokens[far.indexOf(least)] : null;
  }
  function look() {
    const token = state.get('geometry.word');
    if (document.activeElement !== input) input.value = token;
    void page.load(near, 'neighbours', 'neighbours', {model, token, k: 12}, (answer) => {
      /** @type {{token: string, id: number, cosine: number}[]} */
      const found = answer.near;
      const made = bars(found.map((one) => ({...one, p: Math.max(0, one.cosine)})));
      [...made.children].forEach((row, i) => {
        row.firstElementChild?.replaceChildren(el('button', {type: 'button', class: 'link', disabled: !known(found[i].token), onclick: () => pick(found[i].token)}, visible(found[i].token)));
        row.lastElementChild?.replaceChildren(found[i].cosine.toFixed(2));
      });
      list.replaceChildren(note(`Nearest to ${quoted(token)} by cosine:`), made);
      named = [answer.token, ...found.map((one) => one.token)];
      map.redraw();
    });
  }
  function update() {
    void page.load(angles, 'geometry', 'geometry', {model}, (answer) => showAngles(answer, curve, bounds));
    void page.load(flat, 'pca', 'pca', {model, n: 2000}, (answer) => {
      ({tokens, arrays: {xy}} = /** @type {Answer & {tokens: string[]}} */ (answer));
      const [a, b] = answer.explained;
      map.say(`${short(tokens.length)} tokens; these two directions hold ${((a + b) * 100).toFixed(1)}% of the differences. Press a point, or move with the arrow keys.`,
        ['token', 'first', 'second'], tokens.slice(0, 20).map((token, i) => [visible(token), short(xy[2 * i]), short(xy[2 * i + 1])]));
      map.redraw();
      if (!state.get('geometry.word')) pick(tokens.find((token) => /^.?[a-z]{3,}$/i.test(token)) ?? tokens[0]);
    });
    if (state.get('geometry.word')) look();
  }
  state.subscribe(['geometry.word'], look, near);
  return update;
}

/** @param {Answer} answer @param {Chart} curve @param {Box} box */
function showAngles({arrays: {angles, density, random}, bounds: {least_deg, worst_deg, random_deg}, d, words}, curve, box) {
  // Nearly all of the 180 degrees are empty: show where there is anything.
  const most = Math.max(...density, ...random) / 2000;
  const full = Array.from(angles, (_, i) => i).filter((i) => density[i] > most || random[i] > most);
  const [from, to] = [Math.max(0, full[0] - 2), full[full.length - 1] + 3];
  const x = angles.slice(from, to);
  curve.show({x: {label: 'angle in degrees'}, y: {label: 'share of all pairs, per degree', zero: true}, marks: least_deg ? [{x: 90 - least_deg, label: 'bound'}] : [],
    series: [{name: 'this model', x, y: density.slice(from, to), fill: true}, {name: `random directions in ${d} dimensions`, x, y: random.slice(from, to), dash: true}]});
  curve.say(words, ['angle', 'model', 'random'], Array.from(angles, (angle, i) => [angle, density[i], random[i]]).sort((a, b) => b[1] - a[1]).slice(0, 20)
    .map(([angle, own, chance]) => [`${angle.toFixed(1)}°`, own.toFixed(4), chance.toFixed(4)]));
  showStats(box, [['bound: at least one pair differs from 90° by', `${least_deg.toFixed(2)}°`],
    ['most that a pair of random directions differs from 90°', `${random_deg.toFixed(1)}°`], ['most that a pair of this model’s tokens does', `${worst_deg.toFixed(1)}°`]]);
}
