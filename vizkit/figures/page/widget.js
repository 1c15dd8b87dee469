// Plotly's widget with plotly.js loaded once a page, however many figures it has.
//
// anywidget gives up on a model that takes over 2 seconds to initialise, and then drops every later message to it. So
// this initialises at once, and what the kernel sends while plotly.js loads is kept and passed on.
// JupyterLab renders a view before it puts it on the page, where text has no size yet: Plotly would then place the
// subtitle on the title. So this draws when there is room to draw in.
const load = (source) => {
  const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  return import(address).finally(() => URL.revokeObjectURL(address));
};

const hasRoom = (element, signal) =>
  new Promise((resolve) => {
    const watch = new ResizeObserver(() => {
      if (!element.clientWidth) return;
      watch.disconnect();
      resolve();
    });
    watch.observe(element);
    signal.addEventListener("abort", () => watch.disconnect());
  });

const isMessage = ([name, value]) => name.startsWith("_py2js_") && value !== null;

export default () => {
  let ready;
  return {
    initialize({ model }) {
      const early = [];
      const keep = (changed) => early.push(...Object.entries(changed.changedAttributes() || {}).filter(isMessage));
      model.on("change", keep);
      globalThis.vizkitPlotly ??= load(model.get("_plotly_js"));
      ready = globalThis.vizkitPlotly.then((module) => {
        const widget = module.default();
        model.off("change", keep);
        widget.initialize({ model });
        for (const [name, message] of early) {
          model.set(name, message);
          model.set(name, null);
        }
        return widget;
      });
    },
    async render(view) {
      const [widget] = await Promise.all([ready, hasRoom(view.el, view.signal)]);
      return widget.render(view);
    },
  };
};
