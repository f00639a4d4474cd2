/** The first panel: all heads on the left, the map of one on the right. */

import {card, controls, keptChoice, note} from './draw.js';
import {SCORES, attentionChoice, attentionOf, hasScore, layerOf, makeGrid} from './grid.js';
import {makeMap} from './map.js';

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const kind = note();
  const left = card('Every head', 'Each picture is one head: rows are the tokens that attend, columns the tokens they attend to. Choose one to see it large.');
  const right = card('', '', kind);
  const title = /** @type {Box} */ (right.firstChild);
  left.classList.add('all');
  right.classList.add('one');
  root.append(left, right);
  const sorts = keptChoice(page.state, 'sort', 'layer', 'Order by', Object.entries(SCORES).filter(([name]) => hasScore(page, name)));
  left.append(controls(attentionChoice(page), sorts));
  /** @type {Head | null} what the page chose until the reader does */
  let liked = null;

  const grid = makeGrid(left, page, {
    label: 'Heads', sorts: true, pick(head) {
      page.state.set({site: head.site, head: head.head});
      // In one column the map is below the heads; in two it may end below the window, under a lesson.
      right.scrollIntoView({block: right.offsetTop > left.offsetTop + left.offsetHeight / 2 ? 'start' : 'nearest'});
    },
    filled(heads, done) {
      // In an order of the reader's, the first head; it is known when all of them are.
      const best = (done && grid.first()) || mostTelling(heads);
      grid.mark(isChosen);
      if (page.state.get('site') || !best || (liked && !done) || best === liked) return tell();
      liked = best;
      showMap();
    },
  });
  const showHead = makeMap(right, page, 'Attention map');
  const chosen = () => {
    const site = page.state.get('site');
    return site && attentionOf(page).sites.includes(site) ? {site, head: page.state.number('head', 0)} : liked;
  };
  /** @param {Head} head */
  const isChosen = (head) => head.site === chosen()?.site && head.head === chosen()?.head;

  function showMap() {
    const head = chosen();
    if (!head || !page.given) return;
    grid.mark(isChosen);
    tell();
    const run = page.run();
    const side = page.model().shape === 'encoder_decoder' && !head.site.startsWith('encoder') ? 'target' : 'source';
    const cross = head.site.endsWith('cross');
    void showHead({
      title: title.textContent ?? '', rows: side, cols: cross ? 'source' : side, hard: cross,
      asked: (box) => ['map', {run, site: head.site, head: head.head, box, most: 256}],
      exact: (row) => ['row', {run, site: head.site, head: head.head, row}],
    });
  }
  /** What this head resembles, in words. */
  function tell() {
    const head = chosen();
    if (!head) return;
    title.textContent = `Layer ${layerOf(head.site)}, head ${head.head}`;
    const scores = grid.heads().find(isChosen)?.scores;
    kind.textContent = scores ? resemblance(Object.fromEntries(Object.entries(scores).filter(([name]) => hasScore(page, name)))) : '';
  }
  page.state.subscribe(['site', 'head'], showMap, left);
  page.state.subscribe(['sort'], () => {
    grid.arrange();
    grid.mark(isChosen);
  }, left);
  page.state.subscribe(['attention'], () => {
    liked = null;
    grid.fill();
  }, left);
  return (early) => {
    if (chosen() && (!early || page.given)) showMap();
    grid.fill();
  };
}

/** The head whose score stands out most; a first-token head tells least, so it does not count.
 * @param {Head[]} heads @returns {Head | null} */
function mostTelling(heads) {
  /** @param {Head} head */
  const worth = ({scores}) => (scores ? Math.max(scores.alignment ?? 0, scores.induction ?? 0, scores.previous ?? 0) - 0.05 * (scores.entropy ?? 0) : -Infinity);
  return heads.reduce((/** @type {Head | null} */ best, head) => (head.scores && (!best || worth(head) > worth(best)) ? head : best), null);
}

/** @param {{[name: string]: number | null}} scores */
function resemblance(scores) {
  const says = {alignment: 'attends to the source token that is copied (alignment)', induction: 'attends to what followed this token earlier (induction)', previous: 'attends to the token before', first: 'attends to the first token'};
  const [[name, words]] = Object.entries(says).sort(([a], [b]) => (scores[b] ?? 0) - (scores[a] ?? 0));
  const most = scores[name] ?? 0;
  return (most > 0.4 ? `Mostly ${words} (${most.toFixed(2)}).` : name in scores ? 'None of the usual kinds on this text.' : '') +
    (scores.entropy == null ? '' : ` Entropy ${scores.entropy.toFixed(2)} nats: about ${Math.exp(scores.entropy).toFixed(1)} tokens.`);
}
