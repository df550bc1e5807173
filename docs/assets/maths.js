// Renders what arithmatex marked: \( \) within a line, \[ \] on a line of its own. Pages that Material loads by itself too.
document$.subscribe(({ body }) => {
  renderMathInElement(body, {
    delimiters: [
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
  });
});
