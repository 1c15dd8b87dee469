"""Pictures of a trace: Plotly figures that play with no kernel and no network.

`timeline.timeline`, `comparison.compare`, `traffic.traffic_map` and `rings.collective_steps` draw; `html.to_html` makes
a page of any of them and `describe.describe` says the same in words. All are at hand as `vizkit.timeline` and so on.
"""
