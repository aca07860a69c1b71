// How Sphinx's search ranks: as by default, but an exercise comes after the chapter that explains its term.
var Scorer = {
  score: ([docname, title, anchor, description, score]) => score - (docname.startsWith("book/practice/") ? 10 : 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
