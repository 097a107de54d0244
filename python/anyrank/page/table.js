/* --- a table that is sorted and whose rows open --- */

/* columns: {title, key: row => what to sort by, right, small, falls: the first click sorts downwards}; sort: {at, down}. */
function makeHeads(head, columns, sort, draw) {
  columns.forEach((c, i) => {
    const button = make("button", {type: "button", onclick: () => { sort.down = sort.at === i ? !sort.down : Boolean(c.falls); sort.at = i; draw(); }});
    head.append(make("th", {className: (c.right ? "right " : "") + (c.small ? "hide-small" : ""), scope: "col"}, button));
  });
}
function markHeads(head, columns, sort) {
  [...head.children].forEach((th, i) => {
    th.setAttribute("aria-sort", i !== sort.at ? "none" : sort.down ? "descending" : "ascending");
    th.firstChild.textContent = columns[i].title + (i !== sort.at ? "" : sort.down ? " ▼" : " ▲");
  });
}
/* Rows without the number are last either way; equal ones keep their order. */
function sortRows(list, columns, sort) {
  const key = columns[sort.at].key, sign = sort.down ? -1 : 1;
  return list.sort((a, b) => {
    const x = key(a), y = key(b), nx = x === undefined || x !== x, ny = y === undefined || y !== y;
    return nx || ny ? (nx ? 1 : 0) - (ny ? 1 : 0) : sign * (x < y ? -1 : x > y ? 1 : 0);
  });
}
function cellOf(c) {
  return make("td", {className: (c.right ? "right " : "") + (c.small ? "hide-small " : "") + (c.name ? "name" : "")});
}
/* What shows more of a list that has more rows than are drawn. */
function offerMore(place, left, more) {
  place.replaceChildren();
  if (left > 0) place.append(make("button", {type: "button", textContent: `show ${count(Math.min(1000, left))} more`, onclick: more}));
}
