/** The run above the panels: the text or picture given, its tokens, and what the model answers. */

import {upload} from './ask.js';
import {ARROWS, bars, bitmap, colour, complain, el, extent, figure, inkOn, liveOnly, note, percent, quoted, ring, rove, row, shadeOf, textField, visible, watch} from './draw.js';

const SLICE = 250;
const TITLES = {next: 'The next token', classes: 'The class', mask: 'At the mask', token: 'No token is masked', translation: 'The model writes', states: 'States only', seen: 'Attention only'};

/** @param {Box} root @param {Page} page */
export function makeStrip(root, page) {
  const model = page.model();
  const given = el('section', {class: 'card given'});
  const answered = el('section', {class: 'card answer', 'aria-live': 'polite'});
  root.replaceChildren(given, answered);
  /** @type {Record<string, ReturnType<typeof tokenList> | ReturnType<typeof patches> | null>} */
  const shown = {source: null, target: null};
  const first = el('div', {class: 'side'}), second = el('div', {class: 'side'});
  given.append(first);
  if (model.inputs === 'tokens') {
    first.append(runField(page, 'text', model.shape === 'encoder_decoder' ? 'Source' : 'Text'));
    shown.source = tokenList(first, page, 'source');
  } else shown.source = patches(first, page, sampleField(page, given));
  if (model.shape === 'encoder_decoder') {
    given.append(second);
    second.append(runField(page, 'target', 'Target (empty: the model writes it)'));
    shown.target = tokenList(second, page, 'target');
  }
  return {
    /** The tokens once, the answer when it is there. */
    update(first = true) {
      const {given, reading} = page;
      if (!given) return;
      if (first) shown.source?.show(given.source, given);
      if (first && given.target) shown.target?.show(given.target, given);
      if (reading) return showAnswer(answered, reading);
      const {done = 0, of = 1} = given.layers ?? {};
      answered.replaceChildren(el('h2', {}, `Layer ${done} of ${of}`), el('progress', {max: of, value: done, 'aria-label': 'Layers computed'}));
    },
    /** @param {Place['side']} side @param {Numbers | null} weights 0..1, scaled as on the map */
    shade: (side, weights) => shown[side]?.shade(weights),
  };
}

/** @param {Box} root @param {Reading} reading */
function showAnswer(root, {answer, plain, source, target_text, note: more}) {
  const text = answer.text ?? (answer.kind === 'translation' ? target_text : null);
  const first = plain?.top[0];
  const words = first && `Unchanged, it was ${quoted(first.token ?? first.label ?? '')} at ${percent(first.p)}.`;
  root.replaceChildren(...el('div', {}, el('h2', {}, TITLES[answer.kind]), text && el('p', {class: 'said'}, el('bdi', {}, text)),
      plain?.text && plain.text !== text && el('p', {class: 'was'}, 'Unchanged: ', el('bdi', {}, plain.text)),
      answer.words && note(answer.words),
      answer.kind === 'token' && note(`Predicted at the last token, ${quoted(source.tokens[answer.at ?? 0])}, which the model can see.`),
      answer.kind === 'seen' && note('A probe records what happens inside the model, not what it answers.'),
      answer.kind === 'translation' && note('and next:'), answer.top.length && bars(answer.top.slice(0, 4), plain?.top), words && !plain?.text && el('p', {class: 'was'}, words), more && note(more)).childNodes);
}

/** @param {Page} page @param {'text' | 'target'} key */
function runField(page, key, label = '') {
  // A changed source has a new target: the model writes it unless one is given.
  const {area, node} = textField(label, 1, (text) => page.state.set(key === 'text' && page.run().target ? {text, target: ''} : {[key]: text}));
  const fill = () => {
    if (document.activeElement !== area) area.value = page.run()[key] ?? '';
  };
  fill();
  page.state.subscribe(['text', 'target'], fill, node);
  return liveOnly(node);
}

/** @param {Model} model */
export const samplesOf = ({samples = 1}) => Array.from({length: samples}, (_, i) => [`sample:${i}`, `Sample ${i + 1}`]);

/** @param {Page} page @param {Box} box */
function sampleField(page, box) {
  const model = page.model();
  const kind = model.inputs === 'patches' ? 'picture' : 'sound';
  const select = el('select', {'aria-label': `A ${kind}`, onchange: () => page.state.set({text: select.value})}, ...samplesOf(model).map(([value, words]) => el('option', {value}, words)));
  // An upload is none of the samples: then none is chosen.
  const follow = () => void (select.value = page.run().text);
  follow();
  page.state.subscribe(['text'], follow, select);
  const file = el('input', {type: 'file', class: 'file', accept: kind === 'picture' ? 'image/*' : 'audio/wav', onchange: async () => {
    try {
      if (!file.files?.length) return;
      const {text} = await upload(`${kind}?model=${encodeURIComponent(model.name)}`, file.files[0]);
      complain(box, null);
      page.state.set({text});
    } catch (error) {
      complain(box, error);
    }
    // The same file can be chosen again, after a sample or a mended mistake.
    file.value = '';
  }});
  return liveOnly(row(select, el('label', {class: 'file'}, file, el('span', {}, `Open a ${kind}`))));
}

/** Tokens as chips: one tab stop, arrows inside, hover or focus asks the chosen head, click keeps it.
 * @param {Box} root @param {Page} page @param {Place['side']} side */
function tokenList(root, page, side) {
  /** @type {Box[]} */
  let chips = [];
  /** @type {number[]} */
  let shaded = [];
  /** @type {Numbers | null} */
  let last = null;
  let kept = -1, turn = 0, waiting = false;
  /** @param {EventTarget | null} target */
  const at = (target) => (target instanceof HTMLElement && target.dataset.at ? Number(target.dataset.at) : -1);
  const focus = (i = 0) => page.focus(i < 0 ? (kept < 0 ? null : {side, at: kept}) : {side, at: i});
  const list = el('div', {
    class: 'strip', role: 'listbox', 'aria-label': `${side === 'source' ? 'Input' : 'Target'} tokens`, 'aria-orientation': 'horizontal',
    onpointerover: ({target}) => focus(at(target)), onpointerleave: () => focus(-1),
    onfocusin: ({target}) => focus(at(target)), onclick: ({target}) => keep(at(target)),
    onkeydown(event) {
      const from = at(document.activeElement);
      const to = {ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: chips.length - 1}[event.key];
      if (event.key === 'Enter' || event.key === ' ') keep(from);
      else if (to === undefined || !chips[to]) return;
      else rove(list, chips[to]);
      event.preventDefault();
    },
  });
  root.append(list);
  function keep(i = 0) {
    if (i < 0) return;
    chips[kept]?.setAttribute('aria-selected', 'false');
    kept = kept === i ? -1 : i;
    chips[kept]?.setAttribute('aria-selected', 'true');
    focus(kept);
  }
  page.onFocus(list, (place) => {
    list.querySelector('.here')?.classList.remove('here');
    if (place?.side === side) chips[place.at]?.classList.add('here');
  });
  // Once a frame, and after the tooltip has measured itself: a thousand changed chips are styled only once.
  /** @param {Numbers | null} weights */
  function shade(weights) {
    if (!waiting) requestAnimationFrame(paint);
    [last, waiting] = [weights, true];
  }
  function paint() {
    const weights = last;
    waiting = false;
    for (const i of shaded) if (chips[i]) chips[i].style.cssText = '';
    shaded = [];
    for (let i = 0; weights && i < Math.min(weights.length, chips.length); i++) {
      if (weights[i] < 0.02) continue;
      shaded.push(i);
      chips[i].style.backgroundColor = shadeOf(weights[i]);
      chips[i].style.color = inkOn(weights[i]);
    }
  }
  watch(list, () => shade(last));
  return {
    shade,
    /** Only what changed is made anew, a slice at a time: a long text must not hold up typing. @param {Side} told */
    show({tokens, special}) {
      const mine = ++turn;
      const specials = new Set(special);
      const ready = chips;
      for (const chip of ready.splice(tokens.length)) chip.remove();
      shade(null);
      kept = kept < tokens.length ? kept : -1;
      const slice = (from = 0) => {
        if (mine !== turn) return;
        const fresh = [];
        for (let i = from; i < Math.min(from + SLICE, tokens.length); i++) {
          const word = visible(tokens[i]);
          if (!ready[i]) {
            ready[i] = el('bdi', {role: 'option', 'data-at': i, tabindex: i ? '-1' : '0', 'aria-selected': 'false'});
            fresh.push(ready[i]);
          }
          if (ready[i].textContent !== word) ready[i].textContent = word;
          ready[i].classList.toggle('special', specials.has(i));
        }
        list.append(...fresh);
        if (from + SLICE < tokens.length) setTimeout(slice, 0, from + SLICE);
      };
      slice(0);
    },
  };
}

/** A picture with its patches, or a spectrogram with its frames; hovering asks the chosen head about that place.
 * @param {Box} root @param {Page} page @param {Box} sample */
function patches(root, page, sample) {
  /** @type {Given | null} */
  let reading = null;
  /** @type {Numbers | null} */
  let weights = null;
  /** @type {HTMLCanvasElement | null} */
  let picture = null;
  /** @type {number[]} token places that are patches, in reading order */
  let places = [];
  let here = -1;
  const list = el('div', {class: 'strip'});
  const wide = page.model().inputs === 'frames';
  const grid = () => reading?.source.grid ?? [1, Math.max(1, places.length)];
  const drawn = figure(root, {
    label: wide ? 'Spectrogram' : 'The picture and its patches',
    height: (width) => (wide ? 96 : Math.round((width * (reading?.shapes.picture?.[0] ?? 1)) / (reading?.shapes.picture?.[1] ?? 1))),
    draw(ink, width, height) {
      if (!picture) return;
      const [rows, cols] = grid();
      ink.imageSmoothingEnabled = false;
      ink.drawImage(picture, 0, 0, width, height);
      const [w, h] = [width / cols, height / rows];
      if (weights) {
        ink.fillStyle = colour('--card');
        places.forEach((place, i) => {
          ink.globalAlpha = 0.85 * (1 - (weights?.[place] ?? 0));
          ink.fillRect((i % cols) * w, Math.floor(i / cols) * h, w, h);
        });
        ink.globalAlpha = 1;
      }
      if (!wide) {
        ink.strokeStyle = 'rgba(128,128,128,.55)';
        ink.lineWidth = 1;
        for (let r = 1; r < rows; r++) ink.strokeRect(-1, r * h, width + 2, 0);
        for (let c = 1; c < cols; c++) ink.strokeRect(c * w, -1, 0, height + 2);
      }
      const i = places.indexOf(here);
      if (i >= 0) ring(ink, (i % cols) * w + 1, Math.floor(i / cols) * h + 1, Math.max(1, w - 2), h - 2);
    },
    hover(x, y) {
      const [rows, cols] = grid();
      const c = Math.floor((x / drawn.canvas.clientWidth) * cols), r = Math.floor((y / drawn.canvas.clientHeight) * rows);
      const place = places[r * cols + c];
      if (place !== undefined && place !== here) page.focus({side: 'source', at: place});
      return place === undefined ? null : wide ? `Frame ${c + 1} of ${cols}` : `Patch at row ${r + 1}, column ${c + 1}`;
    },
    leave: () => page.focus(null),
    keys(key) {
      if (!ARROWS[key]) return false;
      const [down, across] = ARROWS[key];
      const next = places[Math.max(0, places.indexOf(here)) + (here < 0 ? 0 : down * grid()[1] + across)];
      if (next !== undefined) page.focus({side: 'source', at: next});
      return true;
    },
  });
  drawn.node.classList.add(wide ? 'sound' : 'picture');
  drawn.caption.prepend(sample, list);
  page.onFocus(drawn.node, (place) => {
    here = place?.side === 'source' ? place.at : -1;
    drawn.redraw();
  });
  return {
    /** @param {Numbers | null} news */
    shade(news) {
      weights = news;
      drawn.redraw();
    },
    /** @param {Side} side @param {Given} news */
    show(side, news) {
      reading = news;
      const special = new Set(side.special);
      places = side.tokens.map((_, i) => i).filter((i) => !special.has(i));
      picture = wide ? spectrogram(news) : photograph(news);
      list.replaceChildren(...side.special.slice(0, 8).map((at) => {
        const look = () => page.focus({side: 'source', at});
        return el('bdi', {class: 'special', tabindex: '0', role: 'button', onpointerenter: look, onfocus: look, onpointerleave: () => page.focus(null)}, visible(side.tokens[at]));
      }));
      const [rows, cols] = grid();
      drawn.say(`${wide ? `${places.length} places in time, low sounds below` : `${rows} by ${cols} patches`}. Point at one to see where the chosen head looks from there.`);
      drawn.redraw();
    },
  };
}

/** @param {Given} reading */
function photograph({arrays, shapes}) {
  const [height, width] = shapes.picture ?? [1, 1];
  const image = new ImageData(width, height);
  for (let i = 0; arrays.picture && i < width * height; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = arrays.picture[3 * i + c];
    image.data[4 * i + 3] = 255;
  }
  const canvas = el('canvas', {width, height});
  canvas.getContext('2d')?.putImageData(image, 0, 0);
  return canvas;
}

/** Low frequencies below, as one writes music. @param {Given} reading */
function spectrogram({arrays, shapes}) {
  const values = arrays.spectrogram ?? new Float32Array(1);
  const [mels, frames] = shapes.spectrogram ?? [1, 1];
  const [low, high] = extent(values);
  const turned = new Float32Array(values.length);
  for (let m = 0; m < mels; m++) turned.set(values.subarray(m * frames, (m + 1) * frames), (mels - 1 - m) * frames);
  return bitmap(turned, mels, frames, (value) => (value - low) / (high - low || 1));
}
