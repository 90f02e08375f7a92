// What the theme leaves out for people who do not use a mouse: the search has no name, copy buttons
// share one, and what scrolls cannot be reached by the keyboard.
function name_things() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search this site");
  document.querySelectorAll(".md-code__nav").forEach((nav, number) => {
    nav.setAttribute("aria-label", `Code ${number + 1}`);
  });
  for (const box of document.querySelectorAll("pre, pre > code, .md-typeset__scrollwrap, .md-typeset__table"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
}
new MutationObserver(name_things).observe(document.body, { childList: true, subtree: true });
addEventListener("load", name_things);
addEventListener("resize", name_things);
