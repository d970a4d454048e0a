// Renders a Helm chart with the libraries Helm itself uses, so that tests need no helm: text/template, sprig and
// sigs.k8s.io/yaml from Debian. For tests only. What it leaves out: dependencies, lookup (always empty), libraries,
// glob patterns beyond path.Match, and values.schema.json, which the caller checks. What it is stricter in: a value
// that is not there is an error, not an empty string.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

// files is .Files: the chart's files that are not templates, by slash-separated path.
type files map[string][]byte

func (f files) Get(name string) string { return string(f[name]) }

func (f files) Glob(pattern string) files {
	found := files{}
	for name, content := range f {
		if ok, _ := path.Match(pattern, name); ok {
			found[name] = content
		}
	}
	return found
}

type apiVersions []string

func (v apiVersions) Has(name string) bool {
	for _, one := range v {
		if one == name {
			return true
		}
	}
	return false
}

// valueFiles collects repeated -f flags.
type valueFiles []string

func (v *valueFiles) String() string     { return strings.Join(*v, ",") }
func (v *valueFiles) Set(s string) error { *v = append(*v, s); return nil }

func main() {
	var overrides valueFiles
	chart := flag.String("chart", "", "folder of the chart")
	release := flag.String("release", "tessera", "release name")
	namespace := flag.String("namespace", "default", "namespace")
	flag.Var(&overrides, "f", "file of values; repeatable, the last wins")
	flag.Parse()
	if err := run(*chart, *release, *namespace, overrides); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(chart, release, namespace string, overrides []string) error {
	others, sources, err := readChart(chart)
	if err != nil {
		return err
	}
	values, err := readValues(append([]string{filepath.Join(chart, "values.yaml")}, overrides...))
	if err != nil {
		return err
	}
	metadata := map[string]interface{}{}
	if err := yaml.Unmarshal(others["Chart.yaml"], &metadata); err != nil {
		return err
	}
	context := map[string]interface{}{
		"Values": values,
		"Files":  others,
		"Chart":  capitalise(metadata),
		"Release": map[string]interface{}{
			"Name": release, "Namespace": namespace, "Service": "Helm", "Revision": 1, "IsInstall": true, "IsUpgrade": false,
		},
		"Capabilities": map[string]interface{}{
			"KubeVersion": map[string]interface{}{"Version": "v1.31.0", "Major": "1", "Minor": "31"},
			"APIVersions": apiVersions{"v1"},
		},
	}
	return render(sources, context)
}

func readChart(chart string) (files, files, error) {
	others, sources := files{}, files{}
	err := filepath.Walk(chart, func(name string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		content, err := os.ReadFile(name)
		relative, _ := filepath.Rel(chart, name)
		if relative = filepath.ToSlash(relative); strings.HasPrefix(relative, "templates/") {
			sources[relative] = content
		} else {
			others[relative] = content
		}
		return err
	})
	return others, sources, err
}

func readValues(names []string) (map[string]interface{}, error) {
	merged := map[string]interface{}{}
	for _, name := range names {
		content, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		given := map[string]interface{}{}
		if err := yaml.Unmarshal(content, &given); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		overlay(merged, given)
	}
	return merged, nil
}

// overlay puts given over target as Helm does: maps merge, anything else replaces, null removes.
func overlay(target, given map[string]interface{}) {
	for key, value := range given {
		inner, isMap := value.(map[string]interface{})
		existing, wasMap := target[key].(map[string]interface{})
		switch {
		case value == nil:
			delete(target, key)
		case isMap && wasMap:
			overlay(existing, inner)
		default:
			target[key] = value
		}
	}
}

// capitalise makes Chart.yaml's keys those of Helm's .Chart: appVersion becomes AppVersion.
func capitalise(metadata map[string]interface{}) map[string]interface{} {
	upper := map[string]interface{}{}
	for key, value := range metadata {
		upper[strings.ToUpper(key[:1])+key[1:]] = value
	}
	return upper
}

func render(sources files, context map[string]interface{}) error {
	root := template.New("chart").Option("missingkey=zero")
	root.Funcs(functions(root))
	names := make([]string, 0, len(sources))
	for name, content := range sources {
		if _, err := root.New(name).Parse(string(content)); err != nil {
			return err
		}
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		if strings.HasPrefix(path.Base(name), "_") {
			continue
		}
		var out bytes.Buffer
		context["Template"] = map[string]interface{}{"Name": name, "BasePath": "templates"}
		if err := root.ExecuteTemplate(&out, name, context); err != nil {
			return err
		}
		if strings.Contains(out.String(), "<no value>") {
			return fmt.Errorf("%s: renders a value that is not there", name)
		}
		fmt.Printf("---\n# Source: %s\n%s\n", name, strings.TrimSpace(out.String()))
	}
	return nil
}

func functions(root *template.Template) template.FuncMap {
	all := sprig.TxtFuncMap()
	delete(all, "env")
	delete(all, "expandenv")
	all["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := root.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	all["tpl"] = func(text string, data interface{}) (string, error) {
		inner, err := root.Clone()
		if err != nil {
			return "", err
		}
		parsed, err := inner.New("tpl").Parse(text)
		if err != nil {
			return "", err
		}
		var out bytes.Buffer
		err = parsed.Execute(&out, data)
		return out.String(), err
	}
	all["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, fmt.Errorf("%s", message)
		}
		return value, nil
	}
	all["lookup"] = func(string, string, string, string) map[string]interface{} { return map[string]interface{}{} }
	all["toYaml"] = func(value interface{}) (string, error) {
		text, err := yaml.Marshal(value)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	all["toJson"] = func(value interface{}) (string, error) {
		text, err := json.Marshal(value)
		return string(text), err
	}
	all["fromYaml"] = decodeMap
	all["fromJson"] = decodeMap
	all["fromYamlArray"] = decodeList
	all["fromJsonArray"] = decodeList
	return all
}

func decodeMap(text string) (map[string]interface{}, error) {
	decoded := map[string]interface{}{}
	err := yaml.Unmarshal([]byte(text), &decoded)
	return decoded, err
}

func decodeList(text string) ([]interface{}, error) {
	decoded := []interface{}{}
	err := yaml.Unmarshal([]byte(text), &decoded)
	return decoded, err
}
