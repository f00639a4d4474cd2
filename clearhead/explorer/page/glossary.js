/** The field's words, and what they mean: shown where a text of the page uses one, on hover, focus or tap. */

/** @type {{[word: string]: string}} */
const MEANINGS = {
  'residual stream': 'One vector for each token. Every layer reads it and adds its result to it.',
  'feed-forward': 'The part of a layer that works on each token alone: it widens the vector, applies a nonlinearity, and narrows it again.',
  'attention head': 'A part of a layer that mixes information between tokens: for each token, a weighted mean of values of others.',
  head: 'One of several attentions that a layer computes side by side. Each has its own weights.',
  logit: 'The score of a token before the softmax turns all scores into probabilities.',
  embedding: 'The vector that stands for a token before the first layer.',
  entropy: 'How spread out weights are, in nats. 0: all on one token; ln n: equal on n tokens.',
  loss: 'Minus the logarithm of the probability that the model gives to the token that really comes.',
  softmax: 'Turns scores into positive numbers that sum to 1.',
  temperature: 'Scores are divided by it before the softmax. Below 1, likely tokens become likelier.',
  beam: 'One of the few unfinished texts that a beam search keeps at each step.',
  neuron: 'One number in the widened vector of a feed-forward layer.',
  patch: 'A small square of the picture, or: to replace a value by that of another run.',
};
const WORDS = new RegExp(`\\b(${Object.keys(MEANINGS).join('|')})(s|es)?\\b`, 'gi');

/** A text with its first use of each word explained. @returns {(string | HTMLElement)[]} */
export function explained(words = '') {
  const seen = new Set();
  /** @type {(string | HTMLElement)[]} */
  const parts = [];
  let from = 0;
  for (const found of words.matchAll(WORDS)) {
    const word = found[1].toLowerCase();
    if (seen.has(word)) continue;
    seen.add(word);
    const node = document.createElement('dfn');
    node.tabIndex = 0;
    node.setAttribute('role', 'note');
    node.setAttribute('aria-label', `${found[0]}: ${MEANINGS[word]}`);
    node.append(found[0]);
    const meaning = document.createElement('span');
    meaning.setAttribute('aria-hidden', 'true');
    meaning.append(MEANINGS[word]);
    node.append(meaning);
    parts.push(words.slice(from, found.index), node);
    from = found.index + found[0].length;
  }
  return [...parts, words.slice(from)];
}
