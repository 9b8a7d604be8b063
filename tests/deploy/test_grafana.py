"""What Grafana finds when it starts: a data source, and the dashboard where its provider looks."""

import json

from tests.deploy.files import DEPLOY, compose, documents
from tests.deploy.test_compose import ENVIRONMENT

PROVISIONING = DEPLOY / "grafana" / "provisioning"


def test_data_source_is_the_prometheus_of_the_stack() -> None:
    (source,) = documents(PROVISIONING / "datasources" / "prometheus.yml")[0]["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    interval = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval


def test_dashboards_lie_where_the_provider_looks() -> None:
    (provider,) = documents(PROVISIONING / "dashboards" / "gllm.yml")[0]["providers"]
    place = provider["options"]["path"]
    grafana = compose("compose.yaml", ENVIRONMENT)["services"]["grafana"]
    mounted = {target: source for source, target, _ in (volume.split(":") for volume in grafana["volumes"])}
    assert mounted == {
        place: "./deploy/grafana/dashboards",
        "/etc/grafana/provisioning": "./deploy/grafana/provisioning",
    }
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / "dashboards" / home.removeprefix(place + "/")).exists()


def test_dashboard_takes_any_prometheus() -> None:
    """The variable is how one file serves both the stack and whoever imports it elsewhere."""
    text = (DEPLOY / "grafana" / "dashboards" / "gllm.json").read_text()
    (variable,) = [found for found in json.loads(text)["templating"]["list"] if found["type"] == "datasource"]
    assert variable["query"] == "prometheus"
    uids = {target["datasource"]["uid"] for panel in json.loads(text)["panels"] for target in panel.get("targets", [])}
    assert uids == {f"${{{variable['name']}}}"}
