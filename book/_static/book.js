// Three things that the theme leaves open. The arrows of its contents get names. What is wider than its column scrolls in a box of its own. Such a box says that there is more, and can be reached
// and scrolled with the keyboard. And the contents of the page follow it.
(() => {
  const WIDE = ".paged-plot .wide, .pst-scrollable-table-container, .bd-article div.highlight pre, .formula, .bd-article .output.text_plain";
  const look = (box) => {
    const more = box.scrollWidth > box.clientWidth + 1;
    box.classList.toggle("more", more && box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
    if (more) box.tabIndex = 0;  // the theme looks once, before the window gets narrow
    if (!more && box.getAttribute("tabindex") === "0" && !box.matches("pre")) box.removeAttribute("tabindex");
    if (more && !box.matches("pre") && !box.hasAttribute("role")) {
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", "wider than the page: scrolls sideways");
    }
  };
  const start = () => {
    document.querySelectorAll("summary:has(.toctree-toggle)").forEach((summary) => {
      summary.setAttribute("aria-label", "Pages of: " + summary.closest("li").querySelector("a").textContent.trim());
    });
    const boxes = [...document.querySelectorAll(WIDE)];
    const sizes = new ResizeObserver((entries) => entries.forEach((entry) => look(entry.target)));
    boxes.forEach((box) => {
      sizes.observe(box);
      box.addEventListener("scroll", () => look(box), {passive: true});
    });

    // The contents at the right follow the page: the last heading that has passed the top is the current one.
    const links = [...document.querySelectorAll(".bd-toc a.nav-link[href^='#']")];
    const places = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));
    if (!links.length || places.includes(null)) return;
    let waiting = false;
    const follow = () => {
      waiting = false;
      let now = 0;
      places.forEach((place, i) => { if (place.getBoundingClientRect().top < 140) now = i; });
      if (innerHeight + scrollY >= document.documentElement.scrollHeight - 2) now = links.length - 1;
      links.forEach((link, i) => {
        link.classList.toggle("active", i === now);
        if (i === now) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      });
      const box = links[now].closest(".bd-sidebar-secondary");
      if (box) {
        const inside = links[now].getBoundingClientRect(), outside = box.getBoundingClientRect();
        if (inside.top < outside.top || inside.bottom > outside.bottom) box.scrollTop += inside.top - outside.top - 80;
      }
    };
    addEventListener("scroll", () => {
      if (!waiting) requestAnimationFrame(follow);
      waiting = true;
    }, {passive: true});
    follow();
  };
  if (document.readyState === "complete") start(); else addEventListener("load", start);
})();
