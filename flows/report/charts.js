// Draws the charts of the report one after the other, so that the page can be read before.
(() => {
  const { config, specs } = JSON.parse(document.getElementById("chart-data").textContent);
  const plots = document.querySelectorAll(".plot");
  const boxes = [...document.querySelectorAll(".rounds input")];
  const views = [];
  const ERRORS_ONLY = 1; // of Vega

  function shownRounds() {
    return boxes.filter((box) => box.checked).map((box) => box.value);
  }

  async function draw() {
    for (const [number, spec] of specs.entries()) {
      if (boxes.length) spec.params[0].value = shownRounds();
      const tooltip = { theme: "custom" };
      const options = { config, tooltip, renderer: "svg", actions: false, logLevel: ERRORS_ONLY };
      const { view } = await vegaEmbed(plots[number], spec, options);
      views.push(view);
      await new Promise((done) => setTimeout(done));
    }
  }

  for (const box of boxes) {
    box.addEventListener("change", () => {
      for (const view of views) view.signal("shown", shownRounds()).runAsync();
    });
  }
  requestAnimationFrame(() => setTimeout(draw));
})();
