/** A short walk for newcomers: seven places, one sentence or two at each. */

import {button, el} from './draw.js';

/** @type {{panel: string, at: string, title: string, words: string}[]} */
const STEPS = [
  {panel: 'model', at: '#panel .card', title: 'The model', words: 'Every part of it, with its parameters. The input enters below, the prediction leaves above. Each part is a link to what it computes.'},
  {panel: 'heads', at: '.given', title: 'What the model reads', words: 'The input, cut into tokens. Change the text, and everything below follows. Point at a token to see which tokens a head attends to from there.'},
  {panel: 'heads', at: '.answer', title: 'What it predicts', words: 'The most likely predictions. When you change heads later, the effect shows here.'},
  {panel: 'heads', at: '.all', title: 'Every head at once', words: 'Each small picture is one attention head. A diagonal: it attends to the token before. A bright first column: it attends to the first token.'},
  {panel: 'heads', at: '.one', title: 'One head, large', words: 'A row is a token that attends, a column a token it attends to. Point at a cell to read its weight. Click, then zoom with the wheel or + and −, and drag to move.'},
  {panel: 'lens', at: '#panel .card', title: 'Layer by layer', words: 'The lens applies the model’s head after each layer, as if it were the last. Often the prediction appears midway and then grows more certain.'},
  {panel: 'intervene', at: '#panel .card', title: 'What really matters', words: 'A picture is not an explanation. Set a head to zero and see whether the prediction changes. “Try every head” does this for all of them.'},
];

/** @param {Page} page */
export function startWalk(page) {
  document.querySelector('.walk')?.remove();
  const back = document.activeElement instanceof HTMLElement ? document.activeElement : null;
  const title = el('h2', {id: 'walk-title'});
  const words = el('p');
  const count = el('span', {class: 'note'});
  const before = button('Back', () => go(at - 1), 'quiet');
  const next = button('Next', () => go(at + 1), 'main');
  const box = el('div', {class: 'walk', role: 'dialog', 'aria-labelledby': 'walk-title', 'aria-live': 'polite', onkeydown: (event) => {
    if (event.key === 'Escape') close();
  }}, title, words, el('div', {class: 'row'}, count, before, next, button('Close', close, 'quiet')));
  document.body.append(box);
  let at = 0;

  const steps = STEPS.filter(({panel}) => document.getElementById(`tab-${panel}`));
  function go(to = 0) {
    if (to >= steps.length) return close();
    at = Math.max(0, to);
    const step = steps[at];
    page.state.set({panel: step.panel});
    title.textContent = step.title;
    words.textContent = step.words;
    count.textContent = `${at + 1} of ${steps.length}`;
    before.disabled = at === 0;
    next.textContent = at === steps.length - 1 ? 'Done' : 'Next';
    unmark();
    const target = document.querySelector(step.at);
    target?.classList.add('walked');
    target?.scrollIntoView({block: 'nearest', behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth'});
    next.focus();
  }
  const unmark = () => document.querySelectorAll('.walked').forEach((node) => node.classList.remove('walked'));
  function close() {
    unmark();
    box.remove();
    back?.focus();
  }
  go(0);
}
